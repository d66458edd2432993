"""Folders of the controller's machine that workers open, on nodes that may not have them: models and tokenizers.

    controller: settings with the path of a folder ──pack──► TravellingFolder(path, digest)
    worker's process: TravellingFolder ──unpack──► the same path, if it holds the same files here (the controller's own
                      node, or a shared disk), or else <temporary>/rollart-<user>/models/<digest>, fetched once per node

Invariants: a worker gets a folder with exactly the controller's files. Processes of one node share a copy, which is
fetched by one of them and not removed while one uses it. Beside those in use, a node keeps `UNUSED` copies.
"""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from rollart.distributed.ray_files import FOLDERS, ControllerFiles, Home, RayFiles
from rollart.ports.files import RunFiles
from rollart.ports.folder_transfer import Held, drafts, entries_of, files_of, locked, node_folder, remove_unused
from rollart.types.digests import record_digest
from rollart.types.files import folder_digest

UNUSED = 1
"""Number of unused copies that a node keeps, for the next run."""
MODELS = "models"
_used: dict[Path, Held] = {}
"""Copies that this process uses, until it ends."""


class TravellingFolder(msgspec.Struct, frozen=True):
    """A folder of the controller's machine, in the settings of a worker."""

    path: str
    digest: str
    home: Home

    def here(self) -> Path:
        """The folder on this node, fetched if it is not here."""
        own = Path(self.path)
        if self.home.is_here() or _holds(own, self.digest):
            return own
        return fetch_copy(RayFiles(self.home, FOLDERS), self.digest)


def pack(settings: Mapping[str, Any], files: ControllerFiles) -> dict[str, Any]:
    """Settings with travelling folders in place of their paths, also inside of dictionaries."""

    def packed(value: Any) -> Any:
        digest = files.travelling.get(value) if isinstance(value, str) else None
        return value if digest is None else TravellingFolder(str(Path(value).absolute()), digest, files.home)

    return _mapped(settings, packed)


def unpack(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with paths of this node in place of travelling folders."""

    def unpacked(value: Any) -> Any:
        if not isinstance(value, TravellingFolder):
            return value
        return str(value.here())

    return _mapped(settings, unpacked)


def fetch_copy(files: RunFiles, digest: str) -> Path:
    """This node's copy of a folder, fetched by the first process that asks for it."""
    copy = node_folder(MODELS) / digest
    if copy not in _used:
        _used[copy] = Held(copy)
    with locked(copy):
        if not _holds(copy, digest):
            _make_room(copy)
            files.get(digest, copy)
    return copy


def _make_room(copy: Path) -> None:
    """Remove what a killed process left of this copy, and the oldest copies that no process uses."""
    for left in (copy, *drafts(copy.parent, copy.name)):
        shutil.rmtree(left, ignore_errors=True)
    others = [path for path in copy.parent.iterdir() if path.is_dir() and not path.name.startswith(".")]
    others.sort(key=lambda path: path.stat().st_mtime)
    for old in others[: max(0, len(others) - UNUSED)]:
        remove_unused(old)


def _holds(folder: Path, digest: str) -> bool:
    """Whether a folder has exactly these files. An unchanged folder is hashed once per node."""
    if not folder.is_dir():
        return False
    known = node_folder(MODELS) / f".{record_digest(str(folder).encode())}.known"
    try:
        stamp = _stamp(folder)
        if known.is_file() and known.read_text() == f"{stamp} {digest}":
            return True
        found = folder_digest(entries_of(folder))
        known.write_text(f"{stamp} {found}")
    except OSError:  # what cannot be read is not used
        return False
    return found == digest


def _stamp(folder: Path) -> str:
    """Changes with every write to the folder's files."""
    found = [(path.name, path.stat()) for path in files_of(folder)]
    facts = [(name, each.st_size, each.st_mtime_ns, each.st_ino) for name, each in found]
    return record_digest(repr(facts).encode())


def _mapped(settings: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    return {key: _mapped(value, change) if type(value) is dict else change(value) for key, value in settings.items()}
