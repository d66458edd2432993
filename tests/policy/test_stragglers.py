"""Stragglers: what is late, and when a late member is replaced."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.policy.stragglers import ENOUGH, FACTOR, WINDOW, ClaimPace, Durations, StragglerBook, replace_at
from rollart.types.ids import TrajectoryId

T = TrajectoryId


def durations(*seconds: float) -> Durations:
    made = Durations()
    for each in seconds:
        made.add(each)
    return made


def book(*seconds: float) -> StragglerBook:
    """A book whose task `maze` has had results after these times."""
    made = StragglerBook(["maze", "math"])
    for number, each in enumerate(seconds):
        made.started("maze", T(1000 + number), 0.0)
        made.ended("maze", T(1000 + number), each, result=True)
    return made


# --- patience -------------------------------------------------------------------------------------------------------


def test_there_is_no_patience_before_there_are_enough_results() -> None:
    assert durations(*[1.0] * (ENOUGH - 1)).patience_s() is None
    assert durations(*[1.0] * ENOUGH).patience_s() == FACTOR


def test_patience_follows_the_bulk_and_not_the_worst() -> None:
    assert durations(*[1.0] * 76, *[50.0] * 24).patience_s() == FACTOR


def test_old_durations_are_forgotten() -> None:
    assert durations(*[9.0] * 500, *[1.0] * WINDOW).patience_s() == FACTOR


@given(st.lists(st.floats(0.0, 1e6), min_size=ENOUGH, max_size=2 * WINDOW))
def test_most_of_what_was_measured_would_not_have_been_late(seconds: list[float]) -> None:
    recent = seconds[-WINDOW:]
    patience_s = durations(*seconds).patience_s()
    assert patience_s is not None
    assert sum(each > patience_s for each in recent) <= 0.25 * len(recent) + 1


# --- who is late ----------------------------------------------------------------------------------------------------


def test_a_member_is_late_when_the_patience_of_its_task_is_over() -> None:
    found = book(*[2.0] * ENOUGH)
    found.started("maze", T(1), 10.0)
    found.started("maze", T(2), 11.0)
    found.started("math", T(3), 10.0)
    assert found.next_wake() == 10.0 + 2.0 * FACTOR
    found.check(14.0)
    assert found.late("maze") == {T(1): 10.0}
    assert found.next_wake() == 11.0 + 2.0 * FACTOR
    found.check(100.0)
    assert list(found.late("maze")) == [T(1), T(2)]
    assert found.late("math") == {}, "nothing is known of it"
    assert found.next_wake() is None


@given(st.floats(0.0, 1e9), st.floats(1e-3, 1e4))
def test_a_member_is_late_when_its_wake_has_come(began: float, seconds: float) -> None:
    """Otherwise virtual time stands still there."""
    found = book(*[seconds] * ENOUGH)
    found.started("maze", T(1), began)
    wake = found.next_wake()
    assert wake is not None
    found.check(wake)
    assert found.late("maze") == {T(1): began}


def test_the_end_of_a_member_says_whether_it_was_late_and_only_results_are_measured() -> None:
    found = book(*[2.0] * ENOUGH)
    found.started("maze", T(1), 0.0)
    found.started("maze", T(2), 0.0)
    found.started("maze", T(3), 90.0)
    found.check(50.0)
    assert found.ended("maze", T(1), 100.0, result=False)
    assert found.patience_s("maze") == 2.0 * FACTOR
    assert not found.ended("maze", T(3), 100.0, result=True)
    assert found.ended("maze", T(2), 100.0, result=True)
    with pytest.raises(KeyError):
        found.ended("maze", T(2), 100.0, result=True)


# --- replacing ------------------------------------------------------------------------------------------------------


def test_a_late_member_is_replaced_at_half_time() -> None:
    assert replace_at(began=4.0, last_claim_at=10.0, patience_s=2.0, rounds=0) == 7.0


def test_patience_doubles_with_every_round_of_replacements() -> None:
    assert [replace_at(began=4.0, last_claim_at=2.0, patience_s=2.0, rounds=rounds) for rounds in range(4)] == [
        6.0,
        8.0,
        12.0,
        20.0,
    ]
    assert replace_at(began=4.0, last_claim_at=2.0, patience_s=2.0, rounds=10**6) < 10**6, "finite"


def test_the_pace_of_claims_is_that_of_the_last_ones() -> None:
    pace = ClaimPace()
    assert pace.last_claim_at(1) is None
    pace.claimed(10.0)
    assert pace.last_claim_at(1) is None, "one claim has no pace"
    pace.claimed(13.0)
    assert pace.last_claim_at(1) == 16.0
    assert pace.last_claim_at(2) == 19.0
    for at in (14.0, 15.0, 16.0, 17.0, 18.0):
        pace.claimed(at)
    assert pace.last_claim_at(1) == 19.0
