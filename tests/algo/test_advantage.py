"""Advantages as a specification: hand-computed cases, and what holds for every group."""

import math
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.algo.advantage import (
    Spread,
    at_last_tokens,
    discounted,
    dr_grpo,
    gae,
    gigpo,
    grpo,
    reinforce_plus_plus,
    rloo,
    zero_variance,
)

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


# --- what holds for all that compare within a group

GROUP_RELATIVE = [grpo, dr_grpo, rloo]


@pytest.mark.parametrize("advantage", GROUP_RELATIVE)
@given(group=rewards, data=st.data())
def test_another_order_gives_the_same_advantages_in_that_order(
    advantage: Callable[[list[float]], list[float]], group: list[float], data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(group))))
    assert advantage([group[i] for i in order]) == pytest.approx([advantage(group)[i] for i in order], abs=1e-6)


@pytest.mark.parametrize("advantage", GROUP_RELATIVE)
@given(group=rewards)
def test_they_add_up_to_zero(advantage: Callable[[list[float]], list[float]], group: list[float]) -> None:
    assert math.fsum(advantage(group)) == pytest.approx(0.0, abs=1e-5)
    assert (set(advantage(group)) == {0.0}) == zero_variance(group)


def test_dr_grpo_by_hand() -> None:
    assert dr_grpo([1.0, 2.0, 6.0]) == pytest.approx([-2.0, -1.0, 3.0])


@given(st.lists(st.floats(-100.0, 100.0), min_size=2, max_size=16))
def test_rloo_leaves_one_out(group: list[float]) -> None:
    for i, advantage in enumerate(rloo(group)):
        others = group[:i] + group[i + 1 :]
        assert advantage == pytest.approx(group[i] - math.fsum(others) / len(others), abs=1e-9)


def test_one_that_is_alone_has_no_advantage() -> None:
    assert rloo([3.0]) == dr_grpo([3.0]) == [0.0]


# --- REINFORCE++


def test_reinforce_plus_plus_by_hand() -> None:
    # mean 1, squares 0, 0, 1, 1, 1/2, 1/2
    groups = [[1.0, 1.0], [0.0, 2.0], [1.0 - math.sqrt(0.5), 1.0 + math.sqrt(0.5)]]
    deviation = math.sqrt(3 / 5)
    assert reinforce_plus_plus(groups) == [
        pytest.approx([0.0, 0.0]),
        pytest.approx([-1 / deviation, 1 / deviation], rel=1e-5),
        pytest.approx([-math.sqrt(0.5) / deviation, math.sqrt(0.5) / deviation], rel=1e-5),
    ]
    assert reinforce_plus_plus([[2.0, 2.0], [0.0, 0.0]], group_baseline=True) == [[0.0, 0.0], [0.0, 0.0]]
    assert reinforce_plus_plus([]) == []


@given(st.lists(rewards, min_size=1, max_size=5))
def test_reinforce_plus_plus_is_grpo_of_the_whole_batch(groups: list[list[float]]) -> None:
    flat = [a for group in reinforce_plus_plus(groups) for a in group]
    assert flat == pytest.approx(grpo([r for group in groups for r in group]))


@given(st.lists(rewards, min_size=1, max_size=5))
def test_with_a_group_baseline_every_group_adds_up_to_zero(groups: list[list[float]]) -> None:
    for group, advantages in zip(groups, reinforce_plus_plus(groups, group_baseline=True), strict=True):
        assert math.fsum(advantages) == pytest.approx(0.0, abs=1e-5)
        assert len(advantages) == len(group)


# --- GiGPO


def test_gigpo_by_hand() -> None:
    """Two of three come to "b": there one earns 1 and the other nothing. Returns 1, 0 and 0 from "a"."""
    found = gigpo(
        [["a", "b"], ["a", "b"], ["a", "c"]],
        [[0.0, 1.0], [0.0, 0.0], [0.0, 0.0]],
        step_weight=0.5,
        discount=0.9,
        normalise=False,
    )
    up, down = 2 / 3, -1 / 3
    assert found[0] == pytest.approx([up + 0.5 * (0.9 - 0.3), up + 0.5 * 0.5])
    assert found[1] == pytest.approx([down + 0.5 * -0.3, down - 0.5 * 0.5])
    assert found[2] == pytest.approx([down + 0.5 * -0.3, down])  # no other episode was in "c"


def test_a_state_may_be_met_twice_in_a_trajectory() -> None:
    found = gigpo([["a", "a"], ["b"]], [[0.0, 1.0], [1.0]], discount=0.5, normalise=False)
    assert found == [pytest.approx([-0.25, 0.25]), [0.0]]


episodes = st.lists(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(-3, 3)), min_size=1, max_size=5), min_size=1, max_size=6
)


@given(episodes)
def test_gigpo_without_steps_is_grpo_for_every_turn(group: list[list[tuple[str, int]]]) -> None:
    states = [[state for state, _ in turns] for turns in group]
    earned = [[float(reward) for _, reward in turns] for turns in group]
    expected = grpo([math.fsum(turns) for turns in earned])
    found = gigpo(states, earned, step_weight=0.0)
    assert found == [[pytest.approx(a)] * len(turns) for a, turns in zip(expected, group, strict=True)]


@given(episodes)
def test_steps_of_a_state_add_up_to_zero(group: list[list[tuple[str, int]]]) -> None:
    states = [[state for state, _ in turns] for turns in group]
    earned = [[float(reward) for _, reward in turns] for turns in group]
    with_steps, without = gigpo(states, earned), gigpo(states, earned, step_weight=0.0)
    sums: dict[str, float] = {}
    for keys, left, right in zip(states, with_steps, without, strict=True):
        for key, one, other in zip(keys, left, right, strict=True):
            sums[key] = sums.get(key, 0.0) + one - other
    assert list(sums.values()) == pytest.approx([0.0] * len(sums), abs=1e-5)


def test_gigpo_wants_a_state_for_every_turn() -> None:
    with pytest.raises(ValueError, match="trajectory 1 has 2 states and 1 rewards"):
        gigpo([["a"], ["a", "b"]], [[1.0], [1.0]])


# --- GAE


def test_gae_by_hand() -> None:
    # surprises: 0 + 0.9 * 0.6 - 0.5 = 0.04;  0 + 0.9 * 0.2 - 0.6 = -0.42;  1 + 0 - 0.2 = 0.8
    found = gae([0.0, 0.0, 1.0], [0.5, 0.6, 0.2], discount=0.9, trace=0.5)
    last, middle = 0.8, -0.42 + 0.45 * 0.8
    assert found.advantages.tolist() == pytest.approx([0.04 + 0.45 * middle, middle, last])
    assert found.returns.tolist() == pytest.approx([0.5 + 0.04 + 0.45 * middle, 0.6 + middle, 1.0])


def test_a_truncated_trajectory_goes_on_with_the_value_it_was_left_at() -> None:
    found = gae([0.0], [0.3], discount=0.9, bootstrap=0.5)
    assert found.advantages.tolist() == pytest.approx([0.9 * 0.5 - 0.3])


steps = st.lists(st.tuples(st.floats(-10, 10), st.floats(-10, 10)), min_size=1, max_size=10)


@given(steps, st.floats(0, 1))
def test_with_a_full_trace_returns_are_the_discounted_rewards(
    trajectory: list[tuple[float, float]], gamma: float
) -> None:
    earned, values = [r for r, _ in trajectory], [v for _, v in trajectory]
    found = gae(earned, values, discount=gamma, trace=1.0)
    assert found.returns.tolist() == pytest.approx(discounted(earned, gamma).tolist(), abs=1e-9)


@given(steps, st.floats(0, 1), st.floats(0, 1))
def test_gae_is_the_sum_of_its_definition(trajectory: list[tuple[float, float]], gamma: float, trace: float) -> None:
    earned, values = [r for r, _ in trajectory], [v for _, v in trajectory] + [0.0]
    surprises = [r + gamma * values[t + 1] - values[t] for t, r in enumerate(earned)]
    expected = [
        math.fsum((gamma * trace) ** (k - t) * surprises[k] for k in range(t, len(earned))) for t in range(len(earned))
    ]
    found = gae(earned, values[:-1], discount=gamma, trace=trace)
    assert found.advantages.tolist() == pytest.approx(expected, abs=1e-9)


@given(steps, st.floats(0, 1))
def test_values_that_are_right_leave_no_advantage(trajectory: list[tuple[float, float]], trace: float) -> None:
    earned = [r for r, _ in trajectory]
    found = gae(earned, discounted(earned, 0.9).tolist(), discount=0.9, trace=trace)
    assert found.advantages.tolist() == pytest.approx([0.0] * len(earned), abs=1e-9)


def test_gae_wants_a_value_for_every_reward() -> None:
    with pytest.raises(ValueError, match="2 rewards and 1 values"):
        gae([1.0, 1.0], [1.0])


@given(st.lists(st.tuples(st.integers(0, 4), st.floats(-10, 10)), max_size=8))
def test_rewards_of_turns_come_with_their_last_tokens(turns: list[tuple[int, float]]) -> None:
    """Nothing is lost but what was earned before the first token; nothing comes before it was earned."""
    of_tokens = np.repeat(np.arange(len(turns)), [tokens for tokens, _ in turns])
    found = at_last_tokens([reward for _, reward in turns], of_tokens)
    silent = next((number for number, (tokens, _) in enumerate(turns) if tokens), len(turns))
    assert found.sum() == pytest.approx(math.fsum(reward for _, reward in turns[silent:]), abs=1e-9)
    for place in range(len(found)):
        later = [reward for number, (_, reward) in enumerate(turns) if number >= of_tokens[place]]
        assert found[place:].sum() == pytest.approx(math.fsum(later), abs=1e-9)


def whitened(values):
    """As two ranks do it."""
    both = np.array(values[:1]), np.array(values[1:])
    whole = Spread.of_parts([Spread.of(part) for part in both])
    return np.concatenate([whole.standardised(part) for part in both])


def test_whitened_numbers_have_mean_0_and_deviation_1() -> None:
    found = whitened([1.0, 5.0, 2.0, 9.0])
    assert (found.mean(), found.std(ddof=1)) == (pytest.approx(0.0), pytest.approx(1.0, abs=1e-5))
    assert whitened([0.1, 0.1]).tolist() == [0.0, 0.0]


# --- groups without signal


def test_a_group_whose_rewards_are_equal_has_no_signal() -> None:
    groups: list[list[float]] = [[1.0, 1.0], [0.0, 1.0], [0.0], [0.1, 0.1, 0.1], []]
    assert [zero_variance(group) for group in groups] == [True, False, True, True, True]


def test_numpy_is_all_that_advantages_need() -> None:
    code = "import sys, rollart.algo.advantage; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
