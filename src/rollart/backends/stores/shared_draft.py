"""A version that is being written to a slot of a shared-memory store, and its layout there."""

import mmap
import os
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rollart.types.versions import Version
from rollart.types.weights import Manifest


class Draft:
    """A version that is being written to a slot. The slot is locked for it until `close`."""

    def __init__(
        self,
        manifest: Manifest,
        slot: int,
        evicted: set[Version],
        target: memoryview,
        places: list[int],
        lock: int,
        commit: Callable[[], None],
    ) -> None:
        self.manifest = manifest
        self.slot = slot
        self.evicted = evicted
        """Versions that made room."""
        self._target = target
        self._places = places
        self._lock: int | None = lock
        self.commit = commit
        """Make the version visible. The caller has written and verified every bucket."""

    def place(self, index: int) -> memoryview:
        """Place of a bucket in the slot; writable."""
        return self._target[self._places[index] : self._places[index] + self.manifest.bucket_bytes[index]]

    def close(self) -> None:
        """Unlock the slot; it is free again unless the version was committed."""
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def layout(manifest_bytes: int, manifest: Manifest) -> tuple[list[int], int]:
    """Start of each bucket, and the end of the last one."""
    places = []
    end = manifest_bytes
    for nbytes in manifest.bucket_bytes:
        start = -(-end // mmap.PAGESIZE) * mmap.PAGESIZE
        places.append(start)
        end = start + nbytes
    return places, end
