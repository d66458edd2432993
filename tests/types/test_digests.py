"""Damage to bulk data is detected, whichever version of rollart wrote its digest."""

import hashlib
import itertools
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.types.digests import bulk_digest, matches, record_digest
from rollart.types.errors import UnknownDigest

SIZES = st.one_of(st.integers(1, 600), st.integers(1, 1 << 18))
"""XXH3 has separate paths for up to 16, 128 and 240 bytes and for more, whose blocks are of 1024."""


def old_digest(data: bytes) -> str:
    """As earlier versions wrote it."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


@pytest.mark.parametrize("digest", [bulk_digest, old_digest])
@given(size=SIZES, seed=st.integers(0, 1 << 32), place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_is_detected_at_any_place(digest, size: int, seed: int, place: float, bit: int) -> None:
    data = bytearray(np.random.default_rng(seed).bytes(size))
    published = digest(bytes(data))
    assert matches(published, [data])
    data[int(place * size)] ^= 1 << bit
    assert not matches(published, [data])


@pytest.mark.parametrize("size", [1, 4, 9, 16, 17, 129, 241, 1025])
@pytest.mark.parametrize("fill", [b"\0", b"\xff"])
def test_every_single_flip_is_detected_in_uniform_data(size: int, fill: bytes) -> None:
    data = bytearray(fill * size)
    seen = {bulk_digest(data)}
    for place in range(8 * size):
        data[place // 8] ^= 1 << place % 8
        seen.add(bulk_digest(data))
        data[place // 8] ^= 1 << place % 8
    assert len(seen) == 8 * size + 1


@given(data=st.binary(max_size=3000), cuts=st.lists(st.integers(0, 3000)))
def test_the_digest_does_not_depend_on_how_data_is_cut_into_chunks(data: bytes, cuts: list[int]) -> None:
    ends = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    chunks = [data[start:end] for start, end in itertools.pairwise(ends)]
    assert matches(bulk_digest(data), chunks)
    assert matches(old_digest(data), chunks)


@pytest.mark.parametrize("damaged", [b"", b"weight", b"weights\0", b"\0weights"])
def test_cut_and_padded_data_is_detected(damaged: bytes) -> None:
    assert not matches(bulk_digest(b"weights"), [damaged])


def test_any_contiguous_buffer_is_hashed_in_place() -> None:
    data = np.arange(1000, dtype=np.float32)
    expected = bulk_digest(data.tobytes())
    assert bulk_digest(memoryview(data)) == bulk_digest(memoryview(data).cast("B")) == expected
    assert bulk_digest(bytearray(data.tobytes())) == expected
    with pytest.raises(BufferError):
        bulk_digest(memoryview(data)[::2])


def test_digests_are_the_same_on_every_machine() -> None:
    """The first is the test vector of xxHash; the second is of many blocks, where vector instructions are used."""
    assert bulk_digest(b"") == "xxh3:99aa06d3014798d86001c324468d497f"
    assert bulk_digest(bytes(range(256)) * 256) == "xxh3:9b31b2ce54c6e35a9a1db56d610a5516"


@pytest.mark.parametrize("digest", ["xxh5:" + "0" * 32, "sha256:" + "0" * 64, ":" + "0" * 32, "XXH3:" + "0" * 32])
def test_an_unknown_algorithm_is_refused_by_name(digest: str) -> None:
    name = digest.partition(":")[0]
    with pytest.raises(UnknownDigest, match=f"{re.escape(repr(name))}.* knows only xxh3 and blake2b"):
        matches(digest, [b"weights"])


@pytest.mark.parametrize("digest", ["", "0", "0" * 32, "0" * 37, "xxh3:", "xxh3:0", old_digest(b"weights")[:-1]])
def test_a_malformed_digest_matches_nothing(digest: str) -> None:
    assert not matches(digest, [b"weights"])


def test_the_digest_of_one_algorithm_is_not_taken_for_another() -> None:
    assert not matches(bulk_digest(b"weights").removeprefix("xxh3:"), [b"weights"])
    assert not matches(f"xxh3:{old_digest(b'weights')}", [b"weights"])


def test_records_have_the_digest_that_earlier_versions_gave_them() -> None:
    assert record_digest(b"{}") == old_digest(b"{}")
