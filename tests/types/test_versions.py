"""Versions are ordered by epoch, then by step, and staleness is never negative."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.types.errors import InvariantBroken, NegativeStaleness
from rollart.types.versions import Version, steps_between

versions = st.builds(Version, st.integers(0, 3), st.integers(0, 9))


def test_a_version_reads_as_epoch_and_step() -> None:
    assert str(Version(2, 17)) == "v2.17"


def test_epochs_come_first() -> None:
    assert Version(0, 9) < Version(0, 10) < Version(1, 0) < Version(1, 1)


def test_versions_are_values_and_travel_as_pairs() -> None:
    assert len({Version(0, 1), Version(0, 1), Version(1, 0)}) == 2
    assert msgspec.json.encode(Version(1, 2)) == b"[1,2]"
    with pytest.raises(AttributeError):
        Version(0, 1).step = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("newer", "older", "steps"),
    [((0, 3), (0, 1), 2), ((0, 3), (0, 3), 0), ((1, 4), (0, 3), 1), ((2, 3), (0, 3), 0)],
)
def test_steps_between(newer: tuple[int, int], older: tuple[int, int], steps: int) -> None:
    assert steps_between(Version(*newer), Version(*older)) == steps


@pytest.mark.parametrize(
    ("newer", "older"),
    [
        ((0, 1), (0, 2)),
        ((0, 5), (1, 1)),  # more steps, but of an epoch that was fenced off
        ((1, 1), (0, 2)),  # beyond the checkpoint of the roll-back
    ],
)
def test_a_version_that_went_backwards_is_a_bug(newer: tuple[int, int], older: tuple[int, int]) -> None:
    with pytest.raises(NegativeStaleness, match=f"{Version(*older)} is newer than {Version(*newer)}") as caught:
        steps_between(Version(*newer), Version(*older))
    assert isinstance(caught.value, InvariantBroken)


@given(versions, versions)
def test_steps_are_never_negative(one: Version, other: Version) -> None:
    try:
        assert steps_between(one, other) >= 0
        assert one >= other
    except NegativeStaleness:
        assert one.step < other.step or one.epoch < other.epoch
