"""A version is known to have arrived whole, or refused."""

import hashlib

import msgspec
import pytest

from rollart.types.errors import DigestMismatch, UnknownDigest, WeightError
from rollart.types.versions import Version
from rollart.types.weights import Manifest, TensorEntry, WeightKind, bucket_digest, verify_bucket

BUCKETS = (b"first bucket", b"second")
MANIFEST = Manifest(
    Version(0, 3),
    Version(0, 2),
    WeightKind.FULL,
    (TensorEntry("w", "float32", (1, 3), 0, 0, 12), TensorEntry("b", "uint8", (6,), 1, 0, 6, shard=1)),
    tuple(len(bucket) for bucket in BUCKETS),
    tuple(bucket_digest(bucket) for bucket in BUCKETS),
)


@pytest.mark.parametrize("index", [0, 1])
def test_the_bytes_that_were_published_are_accepted(index: int) -> None:
    verify_bucket(MANIFEST, index, BUCKETS[index])
    verify_bucket(MANIFEST, index, memoryview(BUCKETS[index]))


@pytest.mark.parametrize("data", [b"", b"first bucke", b"first bucket\0", b"First bucket", BUCKETS[1]])
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(DigestMismatch, match=r"bucket 0 of v0\.3") as caught:
        verify_bucket(MANIFEST, 0, data)
    assert isinstance(caught.value, WeightError)


def test_a_manifest_of_an_earlier_rollart_is_verified() -> None:
    old = tuple(hashlib.blake2b(bucket, digest_size=16).hexdigest() for bucket in BUCKETS)
    manifest = msgspec.structs.replace(MANIFEST, digests=old)
    verify_bucket(manifest, 0, BUCKETS[0])
    with pytest.raises(DigestMismatch, match=r"bucket 0 of v0\.3"):
        verify_bucket(manifest, 0, BUCKETS[1])


def test_a_manifest_of_a_newer_rollart_is_refused_and_not_called_damaged() -> None:
    manifest = msgspec.structs.replace(MANIFEST, digests=("xxh5:00", "xxh5:00"))
    with pytest.raises(UnknownDigest, match="'xxh5'") as caught:
        verify_bucket(manifest, 0, BUCKETS[0])
    assert isinstance(caught.value, WeightError)


def test_the_size_of_a_version_is_that_of_its_buckets() -> None:
    assert MANIFEST.total_bytes == 18


def test_a_manifest_survives_the_wire() -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(MANIFEST), type=Manifest) == MANIFEST
