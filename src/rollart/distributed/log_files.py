"""Logs of workers on other nodes, as they arrive in the run folder.

Invariants: every byte of a log is appended once, in order, however often it is sent; after a gap the sender learns
where to go on. At most `LOG_BYTES` of a log are kept here; then a last line says so.
"""

import os
from pathlib import Path

from rollart.ports.folder_transfer import check_name
from rollart.types.errors import FilesError

LOG_BYTES = 64 << 20
APPEND_BYTES = 256 << 10
"""Largest number of bytes that one call may append."""
FULL = f"\n[rollart: the log has {LOG_BYTES >> 20} MB; the rest stays on the worker's node]\n".encode()


class LogFiles:
    """Logs below one folder. A log has one sender, the process of this name. Use from one thread."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._received: dict[str, int] = {}

    def append(self, name: str, offset: int, lines: bytes) -> int:
        """Append what the process wrote at this offset; returns the offset to go on from.

        The first call makes the file.
        """
        if len(lines) > APPEND_BYTES:
            raise FilesError(f"{len(lines)} bytes of the log {name!r} at once; send at most {APPEND_BYTES}")
        path = self._path(name)
        received = self._received.get(name, 0)
        new = lines[received - offset :] if offset <= received else b""
        if name not in self._received or (new and received < LOG_BYTES):
            self._write(path, new if received + len(new) < LOG_BYTES else new + FULL)
        self._received[name] = received + len(new)
        return received + len(new)

    def _path(self, name: str) -> Path:
        """Names of workers are paths below the folder of logs: `engine/H20/0.0`."""
        for part in name.split("/"):
            check_name(part)
        path = self._root / f"{name}.log"
        if path.is_symlink() or not path.parent.resolve().is_relative_to(self._root.resolve()):
            raise FilesError(f"{path} leads out of {self._root}")
        return path

    def _write(self, path: Path, lines: bytes) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab", buffering=0) as file:
                file.write(lines)
        except OSError as error:
            raise FilesError(f"cannot write {path}: {error}") from error


def log_on_node(root: Path, session: str, name: str) -> Path:
    """Where a process on another node writes its log, below the node's folder of logs.

    >>> str(log_on_node(Path("/tmp/logs"), "run-1", "engine/H20/0.0"))
    '/tmp/logs/run-1/engine/H20/0.0.log'
    """
    return root / session / f"{name}.log"


def remove_log(path: Path, root: Path) -> None:
    """Remove a log that was sent, and the folders below `root` that are empty then."""
    path.unlink(missing_ok=True)
    for folder in path.parents:
        if folder == root or not folder.is_relative_to(root):
            return
        try:
            os.rmdir(folder)
        except OSError:  # other logs are there
            return
