"""In-memory `WeightStore` for the workers of one simulated run.

Nominal sizes (`Manifest.bucket_bytes`) determine transfer times; only a few bytes per bucket are stored. Digests cover
the stored bytes and are checked at both ends, so corruption is detected as by a reader of a real store.
"""

from collections.abc import Iterable

from rollart.types.errors import VersionMissing, WeightError
from rollart.types.versions import Version
from rollart.types.weights import Manifest, verify_bucket


class SimStore:
    """Versions only grow and are complete or absent; nothing is evicted."""

    def __init__(self) -> None:
        self._manifests: dict[Version, Manifest] = {}
        self._buckets: dict[Version, list[bytes]] = {}
        self._fence: Version | None = None
        """The newest version ever published; kept even if that version is dropped."""

    def publish(self, manifest: Manifest, buckets: Iterable[bytes | memoryview]) -> None:
        version = manifest.version
        if self._fence is not None and version <= self._fence:
            raise WeightError(
                f"{version} is not newer than {self._fence}, the newest published: versions only grow. "
                "Start the trainer in a new epoch."
            )
        kept = [bytes(data) for data in buckets]
        if not len(kept) == len(manifest.digests) == len(manifest.bucket_bytes):
            raise WeightError(
                f"{version} has {len(kept)} buckets, {len(manifest.digests)} digests and "
                f"{len(manifest.bucket_bytes)} sizes; the numbers must agree. Nothing was published."
            )
        if manifest.depends_on is not None and manifest.depends_on not in self._manifests:
            raise VersionMissing(f"{version} is an adapter on {manifest.depends_on}, which is not in the store")
        for index, data in enumerate(kept):
            verify_bucket(manifest, index, data)
        self._manifests[version] = manifest
        self._buckets[version] = kept
        self._fence = version

    def manifest(self, version: Version) -> Manifest:
        try:
            return self._manifests[version]
        except KeyError:
            raise _missing(version) from None

    def bucket(self, version: Version, index: int) -> bytes:
        manifest = self.manifest(version)
        if not 0 <= index < len(manifest.digests):
            raise VersionMissing(f"{version} has {len(manifest.digests)} buckets; there is no bucket {index}")
        data = self._buckets[version][index]
        verify_bucket(manifest, index, data)
        return data

    def newest(self) -> Version | None:
        return max(self._manifests, default=None)

    def drop(self, version: Version) -> None:
        if any(manifest.depends_on == version for manifest in self._manifests.values()):
            raise WeightError(f"{version} is not dropped: a version in the store depends on it; drop that first")
        self._manifests.pop(version, None)
        self._buckets.pop(version, None)

    def corrupt(self, version: Version, index: int) -> None:
        """Flip the bytes of a bucket: the fault that digests must detect."""
        data = self._buckets[version][index]
        self._buckets[version][index] = bytes(byte ^ 0xFF for byte in data) or b"\x00"


def _missing(version: Version) -> VersionMissing:
    return VersionMissing(
        f"{version} is not in the store: it was never published completely, or was dropped. Publish it again."
    )
