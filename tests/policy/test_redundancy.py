"""Redundant members: none where nothing goes missing, elsewhere as many as pay for themselves, up to a limit."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.policy.redundancy import EVERY, KEEPS, PAYS, RedundancyBook, extra_members, short_share

SIZES, SHARES = st.integers(1, 32), st.floats(0.0, 1.0)


@pytest.mark.parametrize(("size", "extra"), [(2, 0), (3, 1), (2, 2)])
@pytest.mark.parametrize("missing", [0.0, 0.1, 0.5, 1.0])
def test_the_share_of_short_groups_is_that_of_all_ways_in_which_members_can_go_missing(
    size: int, extra: int, missing: float
) -> None:
    share = 0.0
    for lost in itertools.product([False, True], repeat=size + extra):
        probability = 1.0
        for each in lost:
            probability *= missing if each else 1 - missing
        share += probability * (lost.count(False) < size)
    assert short_share(size, extra, missing) == pytest.approx(share)


@given(SIZES, st.integers(0, 8), st.integers(0, 8))
def test_where_nothing_goes_missing_there_is_none(size: int, limit: int, current: int) -> None:
    assert extra_members(size, 0.0, limit=limit, current=current) == 0


@given(SIZES, SHARES, st.integers(0, 8), st.integers(0, 8))
def test_never_above_the_limit_and_each_pays(size: int, missing: float, limit: int, current: int) -> None:
    extra = extra_members(size, missing, limit=limit, current=current)
    assert 0 <= extra <= limit
    for fewer in range(extra):
        assert short_share(size, fewer, missing) >= (KEEPS if fewer < current else PAYS)
    if extra < limit:
        assert short_share(size, extra, missing) < PAYS


@given(SIZES, SHARES, SHARES, st.integers(0, 8))
def test_more_go_missing_more_are_started(size: int, one: float, other: float, limit: int) -> None:
    few, many = sorted((one, other))
    assert extra_members(size, few, limit=limit, current=0) <= extra_members(size, many, limit=limit, current=0)


def test_a_number_is_kept_while_it_almost_pays() -> None:
    missing = 0.03  # a fifth of the groups of 8 would be short
    assert KEEPS < short_share(8, 0, missing) < PAYS
    assert extra_members(8, missing, limit=4, current=0) == 0
    assert extra_members(8, missing, limit=4, current=1) == 1
    assert extra_members(8, 0.01, limit=4, current=1) == 0


def feed(book: RedundancyBook, task: str, *missing: bool) -> list[int]:
    decisions = [book.member_ended(task, missing=each) for each in missing]
    return [decision.extra for decision in decisions if decision is not None]


def test_a_task_is_measured_by_its_own_members() -> None:
    book = RedundancyBook(["calm", "rough"], size=8, limit=2)
    assert feed(book, "calm", *[False] * 4 * EVERY) == []
    assert feed(book, "rough", *([False] * 12 + [True]) * 16) == [1]
    assert (book.extra("calm"), book.extra("rough")) == (0, 1)


def test_a_decision_says_what_it_is_based_on() -> None:
    book = RedundancyBook(["maze"], size=4, limit=1)
    feed(book, "maze", *[True, False] * (EVERY // 2 - 1), True)
    decision = book.member_ended("maze", missing=False)
    assert decision is not None
    assert decision == (1, 0.5, pytest.approx(1 - 0.5**4))


def test_when_nothing_goes_missing_any_more_extra_members_are_dropped() -> None:
    book = RedundancyBook(["maze"], size=8, limit=2)
    assert feed(book, "maze", *[True, False] * EVERY) == [2]
    assert feed(book, "maze", *[False] * 20 * EVERY) == [1, 0]
