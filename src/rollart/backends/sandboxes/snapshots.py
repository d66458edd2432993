"""Snapshots of sandboxes: layers of files in a folder of the worker, within a disk quota.

A snapshot is what its sandbox wrote, on top of the layers that the sandbox started from. A layer stays as long as a
snapshot needs it. The folder is locked by the worker, so that the next launcher removes it if the worker is killed.
"""

import os
import shutil
import threading
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from rollart.backends.sandboxes.launcher import leftovers
from rollart.types.errors import SandboxFault, SnapshotsFull

MB = 2**20
PREFIX = "worker-"


@dataclass(frozen=True)
class Snapshot:
    layers: tuple[str, ...]
    """Folders, the newest first."""
    bytes: int


class Snapshots:
    def __init__(self, parent: Path, quota_mb: int, user: int) -> None:
        self.folder = parent / f"{PREFIX}{os.getpid()}-{uuid4().hex[:8]}"
        self.folder.mkdir(mode=0o711)
        if user != os.geteuid():
            os.chown(self.folder, user, user)
        self._lock_file = leftovers.own(self.folder)
        self._quota = quota_mb * MB
        self._lock = threading.Lock()
        self._kept: dict[str, Snapshot] = {}

    def draft(self) -> tuple[str, Path]:
        """Id of a new snapshot, and the folder to copy its files to."""
        self._check_quota(0)
        name = uuid4().hex
        return name, self.folder / name

    def add(self, name: str, below: tuple[str, ...]) -> None:
        """Keep a draft that is complete."""
        folder = self.folder / name
        size = sum(
            os.lstat(os.path.join(path, file)).st_blocks * 512
            for path, folders, files in os.walk(folder)
            for file in (*folders, *files)
        )
        try:
            self._check_quota(size)
        except SnapshotsFull:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        with self._lock:
            self._kept[name] = Snapshot((str(folder), *below), size)

    def layers(self, name: str | None) -> tuple[str, ...]:
        if name is None:
            return ()
        with self._lock:
            if name not in self._kept:
                raise SandboxFault(f"snapshot {name} is unknown; it was forgotten, or is of another worker")
            return self._kept[name].layers

    def forget(self, name: str) -> None:
        """Remove it, and the layers that are no longer needed."""
        with self._lock:
            gone = self._kept.pop(name, None)
            if gone is None:
                return
            needed = {layer for kept in self._kept.values() for layer in kept.layers}
            for layer in gone.layers:
                if layer not in needed:
                    shutil.rmtree(layer, ignore_errors=True)

    def discard(self, name: str) -> None:
        """Remove a draft that failed."""
        shutil.rmtree(self.folder / name, ignore_errors=True)

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock_file)

    def _check_quota(self, more: int) -> None:
        with self._lock:
            used = sum(kept.bytes for kept in self._kept.values())
        if used + more > self._quota:
            raise SnapshotsFull(
                f"snapshots use {(used + more) // MB} MB of {self._quota // MB} MB; forget some, or set a larger quota"
            )
