"""The RunFiles port: folders that travel between machines, such as checkpoints and models.

A place holds flat folders of files under single names. Invariants: a folder is visible completely and verified, or not
at all; a transfer that fails, or whose process is killed, leaves at most a draft, which is never read, and does not
touch other folders; repeating it is safe. Transfers go in pieces: memory does not grow with the size of a file.
"""

from pathlib import Path
from typing import Protocol

from rollart.types.files import Entries


class RunFiles(Protocol):
    """One place, usable from any thread, and picklable if it can be reached from other processes.

    Every method raises `FilesError` if the place cannot be reached or a name is not that of a single file or folder.
    """

    def folders(self) -> list[str]:
        """Names of all complete folders, sorted."""
        ...

    def contents(self, folder: str) -> Entries:
        """Files of a folder with their digests; raises `FolderMissing`."""
        ...

    def put(self, source: Path, folder: str) -> None:
        """Store a copy of a folder of this machine. When this returns, it is durable and verified at the place.

        Repeating a `put` with the same contents has no effect; other contents under the same name raise `FilesError`.
        """
        ...

    def get(self, folder: str, target: Path) -> None:
        """Copy a folder to a new one of this machine, verified; raises `FolderMissing` or `FolderDamaged`.

        `target` must not exist; it gets its name when all of it is on disk.
        """
        ...

    def delete(self, folder: str) -> None:
        """Delete a folder; unknown ones are ignored."""
        ...

    def discard_drafts(self) -> None:
        """Delete what was received in part. Transfers to this place that are under way fail."""
        ...
