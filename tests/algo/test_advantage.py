"""Advantages as a specification: hand-computed cases, and what holds for every group."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.algo.advantage import grpo

rewards = st.lists(st.floats(-100.0, 100.0), min_size=1, max_size=16)


@pytest.mark.parametrize(
    ("given_rewards", "advantages"),
    [
        # mean 0.5, deviation sqrt(1 / 3) of the sample of four
        ([1.0, 0.0, 0.0, 1.0], [0.5 / math.sqrt(1 / 3)] * 1 + [-0.5 / math.sqrt(1 / 3)] * 2 + [0.5 / math.sqrt(1 / 3)]),
        # mean 1, deviation sqrt(2)
        ([0.0, 2.0], [-1 / math.sqrt(2), 1 / math.sqrt(2)]),
        # mean 2, deviation 1
        ([1.0, 2.0, 3.0], [-1.0, 0.0, 1.0]),
        # mean 0.25, deviation 0.5
        ([0.0, 0.0, 0.0, 1.0], [-0.5, -0.5, -0.5, 1.5]),
    ],
)
def test_by_hand(given_rewards: list[float], advantages: list[float]) -> None:
    assert grpo(given_rewards) == pytest.approx(advantages, rel=1e-5)


def test_the_deviation_is_never_divided_by_alone() -> None:
    """1e-6 is added to it: a group that differs by almost nothing has almost no advantage."""
    low, high = grpo([0.0, 1e-6 * math.sqrt(2)])
    assert (low, high) == pytest.approx((-math.sqrt(2) / 4, math.sqrt(2) / 4))


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, -0.7, 1e-9, 1e9, 1 / 3])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 8])
def test_equal_rewards_have_no_advantage(value: float, size: int) -> None:
    assert grpo([value] * size) == [0.0] * size


def test_nobody_has_none() -> None:
    assert grpo([]) == []


def test_they_are_plain_numbers() -> None:
    assert {type(advantage) for advantage in grpo([1, 0, 1])} == {float}


@given(rewards)
def test_they_add_up_to_zero_and_keep_the_order_of_the_rewards(group: list[float]) -> None:
    advantages = grpo(group)
    assert len(advantages) == len(group)
    assert math.fsum(advantages) == pytest.approx(0.0, abs=1e-5)
    for one, other in zip(sorted(zip(group, advantages, strict=True)), sorted(advantages), strict=True):
        assert one[1] == pytest.approx(other)


@given(rewards, st.floats(-10.0, 10.0))
def test_a_constant_added_to_every_reward_changes_nothing(group: list[float], constant: float) -> None:
    if max(group) - min(group) > 0.01:
        assert grpo([reward + constant for reward in group]) == pytest.approx(grpo(group), abs=1e-6)
