"""Elastic pools: they follow their nodes and what training needs, within their bounds, and do not flap."""

import itertools
import math
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.policy.elasticity import ElasticityPolicy, Resize, Situation, StepUse
from rollart.types.elasticity import ElasticCause, ElasticPool, ElasticRules

TICK_S = 2.5


class Pools:
    """Pools whose engines are as the policy decided."""

    def __init__(self, pools: Mapping[str, tuple[int, int, int]] = {"H20": (1, 4, 2)}, **changes: float) -> None:
        values = {"min_wait": 0.2, "confirm_steps": 2, "confirm_s": 10.0, "hold_s": 60.0} | changes
        self.rules = ElasticRules(
            {name: ElasticPool(*bounds) for name, bounds in pools.items()},
            values["min_wait"],
            int(values["confirm_steps"]),
            values["confirm_s"],
            values["hold_s"],
            TICK_S,
            120.0,
        )
        self.policy = ElasticityPolicy(self.rules)
        self.engines = {name: bounds[2] for name, bounds in pools.items()}
        self.most = {name: bounds[1] for name, bounds in pools.items()}
        self.blocked: tuple[str, ...] = ()
        self.trainer: tuple[str, ...] = ()
        self.now = 0.0
        self.resizes: list[Resize] = []

    def tick(self) -> Resize | None:
        self.now += TICK_S
        resize = self.policy.tick(Situation(self.engines, self.most, self.blocked, self.trainer), self.now)
        if resize is not None:
            assert resize.before == self.engines[resize.pool]
            self.engines[resize.pool] = resize.after
            self.resizes.append(resize)
        return resize

    def wait(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK_S)):
            self.tick()

    def step(self, *, rollout: float = 0.0, busy: float = 1.0, training: float = 0.0, pool: str = "H20") -> None:
        """A step of ten seconds: shares of the trainer's and of the engines' time."""
        count = self.engines[pool]
        self.policy.in_flight(pool, 8 * count)
        use = StepUse(10.0, 10.0 * rollout, 10.0 * count, 10.0 * count * busy, 10.0 * count * training, 0.0)
        self.policy.step_trained({pool: use})
        self.wait(10.0)


def test_a_pool_follows_its_nodes_after_the_time_of_confirmation() -> None:
    pools = Pools()
    pools.policy.room("H20", 4)
    pools.wait(10.0)
    assert pools.engines == {"H20": 2}
    pools.wait(TICK_S)
    assert pools.engines == {"H20": 4}
    pools.policy.room("H20", 1)
    pools.wait(12.5)
    assert pools.engines == {"H20": 1}
    assert [resize.cause for resize in pools.resizes] == [ElasticCause.NODES] * 2


def test_a_node_that_comes_and_goes_changes_nothing() -> None:
    pools = Pools()
    for _ in range(20):
        pools.policy.room("H20", 4)
        pools.wait(7.5)
        pools.policy.room("H20", 2)
        pools.wait(2.5)
    assert not pools.resizes


def test_a_pool_whose_nodes_are_gone_keeps_its_minimum() -> None:
    pools = Pools({"H20": (1, 4, 3), "spot": (0, 4, 3)})
    for name in pools.engines:
        pools.policy.room(name, 0)
    pools.wait(60.0)
    assert pools.engines == {"H20": 1, "spot": 0}
    pools.policy.room("spot", 2)
    pools.wait(60.0)
    assert pools.engines == {"H20": 1, "spot": 2}


def test_without_nodes_there_is_room_for_everything_and_only_training_changes_a_pool() -> None:
    pools = Pools()
    pools.wait(100.0)
    assert not pools.resizes
    for _ in range(3):
        pools.step(rollout=0.4)
    assert pools.engines == {"H20": 4}
    assert pools.resizes[0].cause is ElasticCause.ROLLOUT
    assert pools.resizes[0].why == "H20 2 → 4: the trainer waited for rollout for 40% of the time"


@pytest.mark.parametrize(
    ("rollout", "busy"), [(0.19, 1.0), (0.5, 0.79)], ids=["the trainer hardly waits", "engines are not busy"]
)
def test_a_pool_grows_only_if_engines_are_what_is_missing(rollout: float, busy: float) -> None:
    pools = Pools()
    for _ in range(6):
        pools.step(rollout=rollout, busy=busy)
    assert not pools.resizes


def test_one_step_that_does_not_ask_for_it_prevents_a_change() -> None:
    pools = Pools()
    for number in range(12):
        pools.step(rollout=0.5 if number % 2 else 0.0)
    assert not pools.resizes


def test_the_first_step_after_a_change_does_not_count() -> None:
    pools = Pools(hold_s=1.0)
    for _ in range(3):
        pools.step(rollout=0.4)
    assert len(pools.resizes) == 1
    pools.engines["H20"] = 2  # as if it had been asked for again
    pools.step(rollout=0.4)
    pools.step(rollout=0.4)
    assert len(pools.resizes) == 1
    pools.step(rollout=0.4)
    assert len(pools.resizes) == 2


def test_engines_that_wait_for_training_are_released() -> None:
    pools = Pools({"H20": (1, 8, 8)})
    for _ in range(20):
        load = 2.5 / pools.engines["H20"]
        pools.step(busy=load, training=max(0.0, 1.0 - load))
    assert pools.engines == {"H20": 3}  # ⌈2.5 / 0.9⌉
    assert [(resize.before, resize.after) for resize in pools.resizes] == [(8, 4), (4, 3)]


def test_a_pool_that_turns_is_held_for_longer_each_time() -> None:
    pools = Pools({"H20": (1, 4, 2)})
    for number in range(1000):
        growing = not number // 5 % 2
        pools.step(rollout=0.5 * growing, busy=1.0 if growing else 0.1, training=0.0 if growing else 0.9)
    times = [resize.since for resize in pools.resizes]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert len(pools.resizes) > 6
    assert max(gaps[-3:]) >= 32 * pools.rules.hold_s > 8 * gaps[0]


def test_released_engines_do_not_come_back_for_their_nodes() -> None:
    pools = Pools({"H20": (1, 4, 4)})
    pools.policy.room("H20", 4)
    for _ in range(3):
        pools.step(busy=0.3, training=0.7)
    assert pools.engines == {"H20": 2}
    pools.wait(100.0)
    assert pools.engines == {"H20": 2}


def test_others_that_wait_for_a_node_go_first_unless_a_pool_has_no_engine() -> None:
    pools = Pools({"H20": (1, 4, 1), "spot": (0, 2, 0)})
    pools.blocked = ("H20", "spot")
    pools.policy.room("H20", 4)
    pools.policy.room("spot", 2)
    pools.wait(100.0)
    assert pools.engines == {"H20": 1, "spot": 2}
    pools.blocked = ()
    pools.wait(100.0)
    assert pools.engines == {"H20": 4, "spot": 2}


def test_engines_make_room_for_the_trainer_one_by_one() -> None:
    pools = Pools({"H20": (1, 4, 4)})
    pools.policy.room("H20", 4)
    pools.blocked = pools.trainer = ("H20",)
    pools.wait(12.5)
    assert pools.engines == {"H20": 3}
    pools.wait(100.0)
    assert pools.engines == {"H20": 1}
    assert {resize.cause for resize in pools.resizes} == {ElasticCause.TRAINER}


def test_engines_that_kept_dying_are_replaced_up_to_the_minimum() -> None:
    pools = Pools({"H20": (2, 4, 2)})
    pools.engines["H20"], pools.most["H20"] = 1, 3
    assert pools.tick() is not None
    assert pools.engines == {"H20": 2}
    pools.engines["H20"], pools.most["H20"] = 1, 1
    assert pools.tick() is None


def test_only_one_pool_changes_at_a_time_so_that_both_do_not_take_the_same_node() -> None:
    pools = Pools({"one": (1, 4, 1), "two": (1, 4, 1)})
    for name in pools.engines:
        pools.policy.room(name, 2)
    pools.wait(12.5)
    assert sum(pools.engines.values()) == 3
    pools.policy.room("two", 1)  # as the next look at the nodes shows
    pools.wait(100.0)
    assert pools.engines == {"one": 2, "two": 1}


@settings(max_examples=60, deadline=None)
@given(
    bounds=st.tuples(st.integers(0, 2), st.integers(2, 6), st.integers(0, 4)),
    looks=st.lists(st.tuples(st.integers(0, 8), st.floats(0, 1), st.floats(0, 1), st.booleans()), max_size=80),
)
def test_a_pool_stays_within_its_bounds_and_changes_no_more_often_than_stated(
    bounds: tuple[int, int, int], looks: list[tuple[int, float, float, bool]]
) -> None:
    low, high, more = bounds
    pools = Pools({"H20": (low, high, min(high, low + more))})
    changed_at: list[float] = []
    for room, rollout, busy, steps in looks:
        pools.policy.room("H20", room)
        before = len(pools.resizes)
        if steps:
            pools.step(rollout=rollout, busy=busy, training=1.0 - busy)
        else:
            pools.tick()
        changed_at += [pools.now] * (len(pools.resizes) - before)
        assert low <= pools.engines["H20"] <= high
    for earlier, later in zip(pools.resizes, pools.resizes[1:], strict=False):
        assert earlier.after == later.before
        assert later.after != later.before
        assert math.isfinite(later.since)
