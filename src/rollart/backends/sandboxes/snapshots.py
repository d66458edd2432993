"""Snapshots of sandboxes: layers of files in a folder of the worker, within a disk quota.

A snapshot is what its sandbox wrote, on top of the layers that the sandbox started from. A layer stays as long as a
snapshot or a sandbox needs it. The folder is locked by the worker, so that the next launcher removes it if the worker
is killed.
"""

import os
import shutil
import threading
from collections.abc import Set
from pathlib import Path
from uuid import uuid4

from rollart.backends.sandboxes.launcher import leftovers
from rollart.types.errors import SandboxFault, SnapshotsFull

MB = 2**20
PREFIX = "worker-"


class Snapshots:
    def __init__(self, parent: Path, quota_mb: int, user: int) -> None:
        self.folder = parent / f"{PREFIX}{os.getpid()}-{uuid4().hex[:8]}"
        self.folder.mkdir(mode=0o711)
        if user != os.geteuid():
            os.chown(self.folder, user, user)
        self._lock_file = leftovers.own(self.folder)
        self._quota = quota_mb * MB
        self._lock = threading.Lock()
        self._kept: dict[str, tuple[str, ...]] = {}
        """Layers of each snapshot, as folders, the newest first."""
        self._bytes: dict[str, int] = {}
        """Size of each layer."""

    def draft(self) -> tuple[str, Path]:
        """Id of a new snapshot, and the folder to copy its files to."""
        with self._lock:
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
        with self._lock:
            try:
                self._check_quota(size)
            except SnapshotsFull:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            self._kept[name] = (str(folder), *below)
            self._bytes[str(folder)] = size

    def layers(self, name: str) -> tuple[str, ...]:
        with self._lock:
            if name not in self._kept:
                raise SandboxFault(f"snapshot {name} is unknown; it was forgotten, or is of another worker")
            return self._kept[name]

    def forget(self, name: str) -> None:
        """Its layers stay until `remove_unneeded`."""
        with self._lock:
            self._kept.pop(name, None)

    def remove_unneeded(self, in_use: Set[str]) -> None:
        """Remove layers that are neither those of a snapshot nor in use by a sandbox."""
        with self._lock:
            needed = in_use | {layer for layers in self._kept.values() for layer in layers}
            for layer in [each for each in self._bytes if each not in needed]:
                shutil.rmtree(layer, ignore_errors=True)
                del self._bytes[layer]

    def discard(self, name: str) -> None:
        """Remove a draft that failed."""
        shutil.rmtree(self.folder / name, ignore_errors=True)

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock_file)

    def _check_quota(self, more: int) -> None:
        used = sum(self._bytes.values())
        if used + more > self._quota:
            raise SnapshotsFull(
                f"snapshots use {(used + more) // MB} MB of {self._quota // MB} MB; forget some, or set a larger quota"
            )
