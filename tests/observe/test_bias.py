"""Bias: distances are those of Kolmogorov and Smirnov, and a drift is reported with its remedy."""

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.observe.bias import (
    WARN_COUNT,
    BiasFold,
    BiasTracker,
    Compared,
    Distribution,
    distance,
    means,
    warnings,
)
from rollart.observe.report import make_report
from rollart.sim.run import simulate
from rollart.sim.scenario import load_scenario


def distribution(*values: float) -> Distribution:
    made = Distribution()
    for value in values:
        made.add(value)
    return made


def exact(one: list[float], other: list[float]) -> float:
    return max(
        abs(sum(value <= at for value in one) / len(one) - sum(value <= at for value in other) / len(other))
        for at in [*one, *other]
    )


VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40)


@given(VALUES, VALUES)
def test_a_distance_is_at_most_the_exact_one_and_symmetric(one: list[float], other: list[float]) -> None:
    found = distance(distribution(*one), distribution(*other))
    assert found <= exact(one, other) + 1e-12
    assert found == distance(distribution(*other), distribution(*one))
    assert distance(distribution(*one), distribution(*one)) == 0.0


def test_values_that_are_well_apart_give_the_exact_distance() -> None:
    """Powers of 1.3 are in bins of their own, on both sides of 0."""
    chance = random.Random(0)
    for _ in range(50):
        one, other = ([chance.choice((-1, 1)) * 1.3 ** chance.randrange(12) for _ in range(30)] for _ in range(2))
        assert distance(distribution(*one), distribution(*other)) == pytest.approx(exact(one, other))


def test_dropping_the_slowest_shows_as_their_share() -> None:
    fold = BiasFold()
    for number in range(100):
        fold.add({"duration_s": 1.0 if number < 70 else 9.0}, trained=number < 70)
    (compared,) = fold.compared().values()
    assert compared == Compared(offered=pytest.approx(3.4), trained=1.0, distance=pytest.approx(0.3), count=100)


def test_nothing_to_compare_is_no_distance() -> None:
    assert distance(Distribution(), distribution(1.0)) == 0.0
    assert BiasFold().compared() == {}


def test_a_fold_is_carried_as_plain_data() -> None:
    fold = BiasFold()
    fold.add({"turns": 3.0, "reward": -1.0}, trained=True)
    carried = msgspec.msgpack.decode(msgspec.msgpack.encode(fold), type=BiasFold)
    carried.add({"turns": 5.0}, trained=False)
    fold.add({"turns": 5.0}, trained=False)
    assert carried == fold


def test_folds_of_several_runs_add_up() -> None:
    both, one, other = BiasFold(), BiasFold(), BiasFold()
    for number in range(20):
        values = {"turns": float(number), "reward": number / 3}
        both.add(values, trained=number % 3 > 0)
        (one if number < 7 else other).add(values, trained=number % 3 > 0)
    one.merge(other)
    assert one.compared() == {
        quantity: Compared(pytest.approx(each.offered), pytest.approx(each.trained), each.distance, each.count)
        for quantity, each in both.compared().items()
    }


def test_the_distance_of_a_run_as_it_goes_is_that_of_its_report_when_nothing_is_rolled_back() -> None:
    slow = 'sim.tasks.frozenlake.step_s={kind="uniform", low=0.01, high=0.1, tail_share=0.05, tail=9.0}'
    plain = ["batch.min_group_size=8", "batch.extra_members=0", "batch.replace_late=false", "steps=20"]
    plain += ["tasks.frozenlake.stale_retries=1000"]
    events = simulate(load_scenario("laptop", [slow, *plain])).events
    tracker = BiasTracker()
    for event in events:
        tracker.take(event)
    report = make_report(events)
    assert tracker.distances() == {task: found["duration_s"].distance for task, found in report.bias.items()}
    assert tracker.distances()["frozenlake"] > 0.04, "groups with a slow member are lost"
    assert report.redundancy == {}
    better = make_report(simulate(load_scenario("laptop", [slow, "steps=20"])).events)
    assert better.bias["frozenlake"]["duration_s"].distance < 0.01
    assert better.seconds < 0.5 * report.seconds
    assert better.redundancy["frozenlake"].saved_s > 0
    assert 0 < better.redundancy["frozenlake"].redundant_tokens <= better.wasted_tokens["redundant"]


def test_a_group_has_the_means_of_its_members() -> None:
    assert means([{"turns": 1.0, "reward": 1.0}, {"turns": 3.0}]) == {"turns": 2.0, "reward": 1.0}
    assert means([]) == {}


@pytest.mark.parametrize(
    ("distance", "count", "warns"), [(0.3, WARN_COUNT, True), (0.3, WARN_COUNT - 1, False), (0.05, 10_000, False)]
)
def test_a_drift_is_named_with_the_remedy(distance: float, count: int, warns: bool) -> None:
    calm, drift = Compared(1.0, 1.0, 0.01, count), Compared(3.4, 1.0, distance, count)
    found = warnings({"swe": {"turns": calm, "duration_s": drift}, "idle": {}})
    assert len(found) == warns
    if warns:
        assert "task swe" in found[0]
        assert "duration_s" in found[0]
        assert "Raise tasks.swe.alpha" in found[0]
