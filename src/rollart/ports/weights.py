"""The WeightStore port: trainers publish versions there and engines pull them.

A version is visible completely or not at all: its dependency (`Manifest.depends_on`: the full version under an adapter)
is held for as long as the version itself. Readers verify every bucket against the manifest.
"""

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from rollart.types.versions import Version
from rollart.types.weights import Manifest


class WeightStore(Protocol):
    """Versions only grow: publishing one that is not newer than the newest raises `WeightError`.

    A store with limited space may evict old versions for a new one: never the newest, and never a version that a
    remaining one depends on.
    """

    def publish(self, manifest: Manifest, buckets: Iterable[bytes | memoryview]) -> None:
        """Publish a version. A bucket with a wrong digest raises `DigestMismatch` and publishes nothing.

        Buckets are taken one at a time and copied, so that a publisher can make each when it is taken.
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


@runtime_checkable
class ShardedWeightStore(WeightStore, Protocol):
    """A store to which several processes publish one version together, such as the ranks of a trainer.

        rank 0: begin(manifest) ──► every rank: put(version, its buckets) ──► rank 0: commit(version)

    The manifest lists the buckets of all ranks. Between these calls the ranks wait for each other.
    """

    def begin(self, manifest: Manifest) -> None:
        """Begin to publish a version. Raises as `publish` does; ends an older publication that was not committed."""
        ...

    def put(self, version: Version, index: int, data: bytes | memoryview) -> None:
        """Add a bucket, from any process and in any order. `DigestMismatch` or another `WeightError` if it is wrong."""
        ...

    def commit(self, version: Version, wait_s: float = 0.0) -> None:
        """Make the version visible. Raises `WeightError`, and publishes nothing, if a bucket is missing after `wait_s`
        or if the publication is aborted meanwhile."""
        ...

    def abort(self, version: Version) -> None:
        """End a publication without a version. No effect on a version that was published."""
        ...


@runtime_checkable
class NodeCopies(Protocol):
    """A store that keeps a copy on every node, for processes that cannot reach the store itself."""

    def on_this_node(self, version: Version) -> WeightStore:
        """A picklable store with this version for any process of this node. Blocks until the version is there."""
        ...
