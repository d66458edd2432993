"""The WeightStore port: trainers publish versions there and engines pull them.

A version is visible completely or not at all: its dependency (`Manifest.depends_on`: the full version under an adapter)
is held for as long as the version itself. Readers verify every bucket against the manifest.
"""

from collections.abc import Sequence
from typing import Protocol

from rollart.types.versions import Version
from rollart.types.weights import Manifest


class WeightStore(Protocol):
    """Versions only grow: publishing one that is not newer than the newest raises `WeightError`.

    A store with limited space may evict old versions for a new one: never the newest, and never a version that a
    remaining one depends on.
    """

    def publish(self, manifest: Manifest, buckets: Sequence[bytes | memoryview]) -> None:
        """Publish a version. A bucket with a wrong digest raises `DigestMismatch` and publishes nothing.

        A version whose dependency is not held raises `VersionMissing` and publishes nothing.
        """
        ...

    def manifest(self, version: Version) -> Manifest:
        """Manifest of a version; raises `VersionMissing` if it is not held."""
        ...

    def bucket(self, version: Version, index: int) -> bytes | memoryview:
        """Bytes of a bucket, verified: raises `DigestMismatch` rather than return wrong bytes, or `VersionMissing`."""
        ...

    def newest(self) -> Version | None:
        """Newest version held; None if there is none."""
        ...

    def drop(self, version: Version) -> None:
        """Drop a version; unknown ones are ignored. Later publications must still be newer than it.

        A version that a held one depends on cannot be dropped: `WeightError`.
        """
        ...
