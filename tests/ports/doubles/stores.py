"""Weight stores that break one promise each."""

from collections.abc import Sequence

from rollart.backends.stores.memory import MemoryStore
from rollart.types.versions import Version
from rollart.types.weights import Manifest, verify_bucket


class ReadsUnverified(MemoryStore):
    """Gives whatever bytes it has."""

    def bucket(self, version: Version, index: int) -> bytes:
        return self._held(version)[1][index]


class PublishesUnverified(MemoryStore):
    """Takes whatever bytes it is given."""

    def publish(self, manifest: Manifest, buckets: Sequence[bytes | memoryview]) -> None:
        self._versions[manifest.version] = (manifest, tuple(bytes(bucket) for bucket in buckets))


class GoesBack(MemoryStore):
    """Takes older versions after newer ones."""

    def publish(self, manifest: Manifest, buckets: Sequence[bytes | memoryview]) -> None:
        self._fence = None
        super().publish(manifest, buckets)


class EvictsTheOldest(MemoryStore):
    """Has room for three versions, and evicts the oldest whatever depends on it."""

    def publish(self, manifest: Manifest, buckets: Sequence[bytes | memoryview]) -> None:
        super().publish(manifest, buckets)
        for version in sorted(self._versions)[:-3]:
            del self._versions[version]


class DropsWhatIsNeeded(MemoryStore):
    """Drops whatever it is asked to."""

    def drop(self, version: Version) -> None:
        self._versions.pop(version, None)


class KeepsTheBuffers(MemoryStore):
    """Holds the publisher's buffers instead of a copy."""

    def publish(self, manifest: Manifest, buckets: Sequence[bytes | memoryview]) -> None:
        super().publish(manifest, buckets)
        self._versions[manifest.version] = (manifest, tuple(buckets))  # type: ignore[arg-type]

    def bucket(self, version: Version, index: int) -> bytes:
        manifest, buckets = self._held(version)
        if not 0 <= index < len(buckets):
            return super().bucket(version, index)
        verify_bucket(manifest, index, buckets[index])
        return bytes(buckets[index])
