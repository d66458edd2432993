"""A weight store in the memory of one process.

Invariants: a version is held completely, with its dependency, or not at all; versions only grow, also past those that
were dropped; no reader gets bytes whose digest differs from the manifest.
"""

import threading
from collections.abc import Iterable
from typing import NoReturn

from rollart.ports.weight_rules import (
    check_dependency,
    check_index,
    check_newer,
    check_not_needed,
    checked_buckets,
    not_held,
)
from rollart.types.errors import RequestError
from rollart.types.versions import Version
from rollart.types.weights import Manifest, verify_bucket


class MemoryStore:
    """Weight store shared by reference between the workers of an inline runtime; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._versions: dict[Version, tuple[Manifest, tuple[bytes, ...]]] = {}
        self._fence: Version | None = None
        """Newest version ever published."""

    def publish(self, manifest: Manifest, buckets: Iterable[bytes | memoryview]) -> None:
        version = manifest.version
        # Copied, then verified: later changes to the publisher's buffers have no effect here.
        kept = tuple(bytes(bucket) for _, bucket in checked_buckets(manifest, buckets))
        for index, bucket in enumerate(kept):
            verify_bucket(manifest, index, bucket)
        with self._lock:
            check_newer(version, self._fence)
            check_dependency(manifest, self._versions)
            self._versions[version] = (manifest, kept)
            self._fence = version

    def manifest(self, version: Version) -> Manifest:
        return self._held(version)[0]

    def bucket(self, version: Version, index: int) -> bytes:
        manifest, buckets = self._held(version)
        check_index(manifest, index)
        verify_bucket(manifest, index, buckets[index])
        return buckets[index]

    def newest(self) -> Version | None:
        with self._lock:
            return max(self._versions, default=None)

    def drop(self, version: Version) -> None:
        with self._lock:
            check_not_needed(version, {other: manifest.depends_on for other, (manifest, _) in self._versions.items()})
            self._versions.pop(version, None)

    def _held(self, version: Version) -> tuple[Manifest, tuple[bytes, ...]]:
        with self._lock:
            held = self._versions.get(version)
            if held is None:
                raise not_held(version, self._versions)
            return held

    def __reduce__(self) -> NoReturn:
        raise RequestError(
            "a MemoryStore lives in one process and cannot be sent to another, where it would be an empty copy. "
            "Use the inline runtime, or a weight store that processes share."
        )
