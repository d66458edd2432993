"""What every weight store refuses, in the same words."""

import hashlib
from collections.abc import Iterable, Sequence

import msgspec

from rollart.types.errors import VersionMissing, WeightError
from rollart.types.versions import Version
from rollart.types.weights import Manifest


def check_counts(manifest: Manifest, buckets: Sequence[bytes | memoryview]) -> None:
    """Raise `WeightError` unless there are as many buckets as the manifest names, of the sizes that it names."""
    version = manifest.version
    if not len(buckets) == len(manifest.digests) == len(manifest.bucket_bytes):
        raise WeightError(
            f"{version} has {len(buckets)} buckets, {len(manifest.digests)} digests and "
            f"{len(manifest.bucket_bytes)} sizes; they must be as many. Nothing was published."
        )
    for index, (bucket, nbytes) in enumerate(zip(buckets, manifest.bucket_bytes, strict=True)):
        if memoryview(bucket).nbytes != nbytes:
            raise WeightError(
                f"bucket {index} of {version} has {memoryview(bucket).nbytes} bytes, but its manifest says {nbytes}. "
                "Nothing was published."
            )


def check_newer(version: Version, fence: Version | None) -> None:
    """Raise `WeightError` unless the version is newer than every one that was ever published."""
    if fence is not None and version <= fence:
        raise WeightError(
            f"{version} is not newer than {fence}, the newest version published. "
            "Versions only grow; a restarted trainer publishes under a new epoch."
        )


def check_index(manifest: Manifest, index: int) -> None:
    if not 0 <= index < len(manifest.digests):
        raise VersionMissing(f"{manifest.version} has no bucket {index}, only {len(manifest.digests)} of them")


def not_held(version: Version, held: Iterable[Version]) -> VersionMissing:
    there = ", ".join(map(str, sorted(held))) or "nothing"
    return VersionMissing(f"{version} is not in the store, which holds {there}; publish or stage another")


def sealed(manifest: Manifest) -> tuple[bytes, str]:
    """A manifest as JSON, and the digest by which a reader in another process knows that it arrived whole."""
    data = msgspec.json.encode(manifest)
    return data, manifest_digest(data)


def manifest_digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
