"""Tasks that find their hardware class by measurement, in whole runs in virtual time."""

import pytest
from audit import completed
from worlds import MODES, Ran, run, two_tasks

from rollart.observe.report import make_report
from rollart.types.affinity import AffinityCause
from rollart.types.ids import TrajectoryId
from rollart.types.journal import AffinityChanged, GroupOpened, Placed, RunStarted, TrajectoryStarted, TurnEnded

AUTO = ("tasks.game.hardware=auto", "tasks.math.hardware=auto", "affinity.confirm_s=0.5", "affinity.hold_s=2.0")
"""Runs of a few seconds decide within seconds."""
UNLIKE = ("pools.wide.inject={prefill=20.0}", "pools.fast.inject={decode=20.0}", "pools.wide.engines=1")
MIXES = (
    "sim.tasks.game.prompt_tokens=400",
    "sim.tasks.game.observation_tokens=200",
    "sim.tasks.game.answer_tokens=4",
    "sim.tasks.math.prompt_tokens=10",
    "sim.tasks.math.answer_tokens=100",
)
"""The game is mostly prefill, maths mostly decoding."""


def found(*more: str) -> Ran:
    ran = run(two_tasks(*AUTO, *UNLIKE, *MIXES, "steps=20", *more))
    completed(ran)
    return ran


def test_tasks_find_the_class_that_suits_them_and_stay() -> None:
    ran = found()
    first, *later = ran.of(AffinityChanged)
    assert first.cause is AffinityCause.MEASURED
    assert first.assigned == {"game": "fast", "math": "wide"}
    assert not later
    report = make_report(ran.events)
    assert report.affinity["game"].startswith("game → fast: ")
    assert "prefill, which costs" in report.affinity["game"]
    assert "decoding, which costs" in report.affinity["math"]
    assert report.moves == 0
    assert [decision.cause for decision in report.decisions] == [AffinityCause.MEASURED]
    assert report.placements["game"]["fast"] > 4 * report.placements["game"].get("wide", 0)
    assert report.placements["math"]["wide"] > 4 * report.placements["math"].get("fast", 0)


def test_trajectories_in_flight_follow_a_decision() -> None:
    long = ("sim.tasks.game.turns={kind='uniform', low=15, high=25}", "tasks.game.max_turns=30")
    ran = found(*long)
    assert any(event.reason == "fast preferred now" for event in ran.of(Placed))


def test_pools_that_change_places_are_noticed() -> None:
    swap = [
        "pools.wide.inject=[{prefill=20.0}, {decode=20.0, from_s=20.0}]",
        "pools.fast.inject=[{decode=20.0}, {prefill=20.0, from_s=20.0}]",
    ]
    ran = found(*swap, "steps=250", "affinity.explore=0.1")
    last = ran.of(AffinityChanged)[-1]
    assert last.cause is AffinityCause.GAIN
    assert last.assigned == {"game": "wide", "math": "fast"}
    assert last.at > 20.0


@pytest.mark.parametrize("mode", MODES)
def test_modes_without_affinity_measure_nothing(mode: str) -> None:
    ran = run(two_tasks(*AUTO, f"mode={mode}"))
    completed(ran)
    (started,) = ran.of(RunStarted)
    assert (started.affinity is not None) == (mode == "rollart")
    if mode != "rollart":
        assert not ran.of(AffinityChanged)
        assert not any(event.reason for event in ran.of(Placed))


def test_a_declared_class_wins() -> None:
    ran = found("tasks.game.hardware=wide")
    assert all("game" not in event.assigned for event in ran.of(AffinityChanged))
    (started,) = ran.of(RunStarted)
    assert started.affinity.declared == {"game": "wide"}
    assert not any(event.reason == "fast is measured" for event in ran.of(Placed) if event.trajectory in games(ran))
    elsewhere = [event for event in ran.of(Placed) if event.trajectory in games(ran) and event.hardware != "wide"]
    assert {event.reason for event in elsewhere} <= {"wide overloaded", "wide missing"}


def games(ran: Ran) -> set[TrajectoryId]:
    groups = {event.group for event in ran.of(GroupOpened) if event.task == "game"}
    return {event.trajectory for event in ran.of(TrajectoryStarted) if event.group in groups}


def test_one_class_needs_no_measuring() -> None:
    ran = run(two_tasks(*AUTO, "pools.fast.engines=0"))
    completed(ran)
    assert ran.of(RunStarted)[0].affinity is None
    assert ran.of(TurnEnded)
