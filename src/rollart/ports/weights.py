"""The WeightStore port: where a trainer leaves versions and engines find them.

A version is visible as a whole or not at all. Readers verify every bucket against the manifest.
"""

from collections.abc import Sequence
from typing import Protocol

from rollart.types.versions import Version
from rollart.types.weights import Manifest


class WeightStore(Protocol):
    """Versions only grow: publishing one that is not newer than the newest raises `WeightError`."""

    def publish(self, manifest: Manifest, buckets: Sequence[bytes | memoryview]) -> None:
        """Make a version available. A bucket with a wrong digest raises `DigestMismatch` and publishes nothing."""
        ...

    def manifest(self, version: Version) -> Manifest:
        """Raises `VersionMissing` for a version that is not there."""
        ...

    def bucket(self, version: Version, index: int) -> bytes | memoryview:
        """The bytes of a bucket, verified: `DigestMismatch` rather than wrong bytes; `VersionMissing` if not there."""
        ...

    def newest(self) -> Version | None:
        """The newest version held, None if there is none."""
        ...

    def drop(self, version: Version) -> None:
        """Forget a version; unknown ones are ignored. What may be published still has to be newer than it was."""
        ...
