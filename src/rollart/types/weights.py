"""Manifests of weight versions: what a version consists of, and how to verify that it arrived complete."""

import enum
from collections.abc import Iterable

import msgspec

from rollart.types.digests import bulk_digest, matches
from rollart.types.errors import DigestMismatch
from rollart.types.versions import Version


class WeightKind(enum.Enum):
    """What the tensors of a manifest are."""

    FULL = "full"
    """All weights."""
    ADAPTER = "adapter"
    """A low-rank adapter on the parent."""


class TensorEntry(msgspec.Struct, frozen=True):
    """Location of one tensor: bucket and byte offset."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bucket: int
    offset: int
    nbytes: int
    shard: int = 0


class Manifest(msgspec.Struct, frozen=True):
    """A published version. Its digests are checked before an engine samples a token with it."""

    version: Version
    parent: Version | None
    kind: WeightKind
    tensors: tuple[TensorEntry, ...]
    bucket_bytes: tuple[int, ...]
    digests: tuple[str, ...]

    @property
    def depends_on(self) -> Version | None:
        """Version needed to read this one; None for a full one, whatever its parent."""
        return None if self.kind is WeightKind.FULL else self.parent

    @property
    def total_bytes(self) -> int:
        return sum(self.bucket_bytes)


def bucket_digest(data: bytes | memoryview) -> str:
    """Digest of a bucket, as in `Manifest.digests`."""
    return bulk_digest(data)


def verify_bucket(manifest: Manifest, index: int, data: bytes | memoryview) -> None:
    """Raise `DigestMismatch` unless the bytes match the bucket's digest; `UnknownDigest` if that cannot be computed."""
    verify_chunks(manifest, index, (data,))


def verify_chunks(manifest: Manifest, index: int, chunks: Iterable[bytes | memoryview]) -> None:
    """`verify_bucket` of chunks, taken one at a time."""
    if not matches(manifest.digests[index], chunks):
        raise DigestMismatch(
            f"bucket {index} of {manifest.version} does not have the digest of its manifest: "
            "the transfer was cut or corrupted. The version in service stays; publish the version again."
        )
