"""Where the checkpoints of a run are kept: in the run folder, in a folder that its machines share, or at a URL.

Everything that asks for the checkpoints of a run (training, resume, evaluation, the result) asks here.
"""

import shutil
import socket
from pathlib import Path

from rollart.backends.trainers.checkpoint import CheckpointPlace, Checkpoints, folder_name
from rollart.backends.trainers.remote_checkpoints import held_at
from rollart.config.schema import RunConfig
from rollart.ports.files import RunFiles
from rollart.ports.folder_transfer import fetch
from rollart.types.digests import record_digest
from rollart.types.errors import ConfigError, FilesError, RequestError
from rollart.types.versions import Version

CHECKPOINTS = "checkpoints"
KEY = "checkpoint_url"


def checkpoint_place(config: RunConfig, folder: Path, files: RunFiles | None = None) -> Path | CheckpointPlace:
    """Where the trainer of the run in `folder` saves to and starts from.

    `files` reaches the run's checkpoints from other machines; without it the trainer opens the run folder itself.
    """
    remote = _at_url(config) or (None if config.checkpoint_url else files)
    return _folder(config, folder) if remote is None else CheckpointPlace(remote, _scratch_name(folder))


def held_versions(config: RunConfig, folder: Path) -> list[Version]:
    """Versions of the checkpoints of a run, oldest first; raises `FilesError` if their place cannot be reached."""
    files = _at_url(config)
    return Checkpoints(_folder(config, folder)).held() if files is None else held_at(files)


def newest_name(config: RunConfig, folder: Path) -> str:
    """Path or URL of the last checkpoint; empty before the first."""
    held = held_versions(config, folder)
    root = config.checkpoint_url.rstrip("/") if is_url(config) else str(_folder(config, folder))
    return f"{root}/{folder_name(held[-1])}" if held else ""


def newest_folder(config: RunConfig, folder: Path) -> Path | None:
    """Folder of the last checkpoint on this machine; None before the first."""
    checkpoints = Checkpoints(local_root(config, folder))
    held = checkpoints.held()
    return checkpoints.folder(held[-1]) if held else None


def local_root(config: RunConfig, folder: Path) -> Path:
    """Folder of this machine with the last checkpoint; one at a URL is fetched into the run folder."""
    files = _at_url(config)
    if files is None:
        return _folder(config, folder)
    root, held = folder / CHECKPOINTS, held_at(files)
    if held:
        name = folder_name(held[-1])
        fetch(files, name, root / name)
        for other in Checkpoints(root).held():
            if other != held[-1]:
                shutil.rmtree(root / folder_name(other), ignore_errors=True)
    return root


def check_unused(config: RunConfig) -> None:
    """Refuse a new run whose place holds checkpoints: its trainer would start from those of another run."""
    if not config.checkpoint_url:
        return
    try:
        held = held_versions(config, Path())
    except (FilesError, RequestError) as error:
        raise ConfigError(KEY, str(error)) from error
    if held:
        raise ConfigError(
            KEY,
            f"{config.checkpoint_url} already holds checkpoints, the last that of step {held[-1].step}; name a new one",
        )


def is_url(config: RunConfig) -> bool:
    return "://" in config.checkpoint_url


def _at_url(config: RunConfig) -> RunFiles | None:
    if not is_url(config):
        return None
    from rollart.distributed.fsspec_files import FsspecFiles  # late: most runs do not need it

    return FsspecFiles(config.checkpoint_url)


def _folder(config: RunConfig, folder: Path) -> Path:
    return Path(config.checkpoint_url).absolute() if config.checkpoint_url else folder / CHECKPOINTS


def _scratch_name(folder: Path) -> str:
    """The same for every session of a run, and for no other run."""
    whole = f"{socket.gethostname()}:{folder.absolute()}"
    return f"{folder.absolute().name}-{record_digest(whole.encode())[:12]}"
