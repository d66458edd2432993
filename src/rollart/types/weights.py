"""Weight versions as manifests: what a version consists of, and how to know that it arrived whole."""

import enum
import hashlib

import msgspec

from rollart.types.errors import DigestMismatch
from rollart.types.versions import Version


class WeightKind(enum.Enum):
    """What the tensors of a manifest are."""

    FULL = "full"
    """All weights."""
    ADAPTER = "adapter"
    """A low-rank adapter on the parent."""
    DELTA = "delta"
    """Differences to the parent."""


class TensorEntry(msgspec.Struct, frozen=True):
    """Where one tensor lies: in which bucket, from which byte."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bucket: int
    offset: int
    nbytes: int
    shard: int = 0


class Manifest(msgspec.Struct, frozen=True):
    """A published version. Its digests are checked before an engine serves a token with it."""

    version: Version
    parent: Version | None
    kind: WeightKind
    tensors: tuple[TensorEntry, ...]
    bucket_bytes: tuple[int, ...]
    digests: tuple[str, ...]

    @property
    def total_bytes(self) -> int:
        return sum(self.bucket_bytes)


def bucket_digest(data: bytes | memoryview) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def verify_bucket(manifest: Manifest, index: int, data: bytes | memoryview) -> None:
    """Raise `DigestMismatch` unless these are the bytes of that bucket."""
    if bucket_digest(data) != manifest.digests[index]:
        raise DigestMismatch(
            f"bucket {index} of {manifest.version} does not have the digest of its manifest: "
            "the transfer was cut or corrupted. The version in service stays; publish the version again."
        )
