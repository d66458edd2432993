"""Checkpoints of a trainer on any machine: written to a scratch folder there, then sent to where they are kept.

    trainer's machine                                            the run folder, or a URL (`RunFiles`)
    <temporary>/rollart-<user>/checkpoints/<run>/step-…   ──►   step-…
                                                          ◄──   at the start, if it is not here

Invariants:
- A checkpoint is saved when it is whole and verified where it is kept; until then the previous one counts.
- A trainer starts from the newest valid checkpoint there, on any machine. A copy in its scratch folder is used only if
  it has the same contents.
- The scratch folder has as many checkpoints as are kept, and is removed at the end; what a killed trainer left is
  removed by the next one on that machine, of this run or another.
"""

import logging
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rollart.backends.trainers.checkpoint import (
    Checkpoint,
    CheckpointPlace,
    Checkpoints,
    Damaged,
    NotSaved,
    folder_name,
    verified,
    version_of,
)
from rollart.ports.files import RunFiles
from rollart.ports.folder_transfer import Held, fetch, node_folder, remove_unused
from rollart.types.errors import FilesError, FolderDamaged, FolderMissing, RequestError
from rollart.types.versions import Version

logger = logging.getLogger(__name__)

SCRATCH = "checkpoints"


def open_checkpoints(where: str | CheckpointPlace, keep: int) -> "Checkpoints | RemoteCheckpoints":
    """Checkpoints in a folder of this machine, or at a place elsewhere."""
    return Checkpoints(Path(where), keep=keep) if isinstance(where, str) else RemoteCheckpoints(where, keep=keep)


def held_at(files: RunFiles) -> list[Version]:
    """Versions at a place, oldest first: complete when stored, not verified since."""
    return sorted(version for name in files.folders() if (version := version_of(name)) is not None)


class RemoteCheckpoints:
    """The checkpoints of one run at a place elsewhere; same methods as `Checkpoints`."""

    def __init__(self, place: CheckpointPlace, *, keep: int = 2) -> None:
        self._files: RunFiles = place.files
        self._keep = keep
        self._scratch = _scratch(place)
        self._held = Held(self._scratch)
        for other in self._scratch.parent.iterdir():
            if other != self._scratch and other.is_dir():
                remove_unused(other)
        self._damaged: set[Version] = set()
        """Versions that `newest` found damaged where they are kept; removed by the next save."""

    def newest(self) -> Checkpoint | None:
        """The newest valid checkpoint, fetched if it is not here; None if nothing was ever saved."""
        self._files.discard_drafts()  # of a trainer that was killed, or was replaced by this one
        held = held_at(self._files)
        self._forget_unsent(held)
        for version in reversed(held):
            folder = self._scratch / folder_name(version)
            try:
                fetch(self._files, folder.name, folder)
                return verified(folder, version)
            except (FolderMissing, FolderDamaged, Damaged) as damage:
                self._damaged.add(version)
                shutil.rmtree(folder, ignore_errors=True)
                logger.warning("skipping damaged checkpoint of %s: %s", version, damage)
        if held:
            raise RequestError(
                f"none of the {len(held)} checkpoints of this run is intact (the log has the reason for each). "
                "Restore one, or remove all of them to start from scratch."
            )
        return None

    def save(self, version: Version, files: Iterable[tuple[str, bytes]], facts: Mapping[str, Any]) -> None:
        """Write a checkpoint here and send it; it is durable and verified there when this returns."""
        name = folder_name(version)
        try:
            held = [other for other in held_at(self._files) if other not in self._damaged]
            if held and version <= held[-1]:
                raise NotSaved(f"{version} is not newer than the checkpoint of {held[-1]}: versions only grow.")
            self._forget_unsent(held)
            if version in self._damaged:
                self._files.delete(name)
            Checkpoints(self._scratch, keep=self._keep).save(version, files, facts)
            self._files.put(self._scratch / name, name)
        except FilesError as error:
            shutil.rmtree(self._scratch / name, ignore_errors=True)
            raise NotSaved(f"cannot store the checkpoint of {version}: {error}. The previous one is intact.") from error
        self._damaged.discard(version)
        self._prune([*held, version])

    def close(self) -> None:
        """Remove the scratch folder, unless another process of this run still reads it."""
        self._held.close()
        remove_unused(self._scratch)

    def _prune(self, whole: list[Version]) -> None:
        for version in (*sorted(self._damaged), *whole[: -self._keep]):
            try:
                self._files.delete(folder_name(version))
            except FilesError as error:  # the next save tries again
                logger.warning("cannot remove the checkpoint of %s: %s", version, error)
            else:
                self._damaged.discard(version)

    def _forget_unsent(self, held: list[Version]) -> None:
        """Remove checkpoints from scratch that never arrived, or are not kept any more."""
        for version in Checkpoints(self._scratch).held():
            if version not in held:
                shutil.rmtree(self._scratch / folder_name(version), ignore_errors=True)


def _scratch(place: CheckpointPlace) -> Path:
    return node_folder(SCRATCH) / place.run
