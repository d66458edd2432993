"""Elastic pools in virtual time: nodes join and leave while a run goes on."""

import itertools
from typing import Any

from rollart.observe.audit import audit
from rollart.observe.report import make_report
from rollart.sim.fuzz import make_world
from rollart.sim.run import Simulated, simulate
from rollart.sim.scenario import parse_scenario
from rollart.types.elasticity import ElasticCause
from rollart.types.journal import EnginesChanged, JournalEvent, RoomChanged, StepTrained, TrajectoryEnded, WorkerLeft
from rollart.types.trajectory import Outcome

STEPS = 60
WORLD = 16
"""A fuzzed world in mode rollart without faults of its own."""


def tables(**changes: Any) -> dict[str, Any]:
    made = make_world(WORLD).tables
    for task in made["sim"]["tasks"].values():
        task.update(reset_failure=0.0, step_failure=0.0)
    pools = {"fast": {"engines": 1}, "wide": {"engines": {"min": 0, "max": 3}}}
    made |= {"steps": STEPS, "mode": "rollart", "alpha": 1, "eval_every": 0, "pools": pools}
    made["elasticity"] = {"confirm_s": 2.0}
    made["deadlines"]["drain_s"] = 10.0
    return made | changes


def run(made: dict[str, Any]) -> Simulated:
    done = simulate(parse_scenario(made))
    assert done.error is None
    assert not audit(done.events)
    return done


def of_kind(done: Simulated, kind: type) -> list[Any]:
    return [event for event in done.events if isinstance(event, kind)]


def longest_step_s(events: list[JournalEvent]) -> float:
    times = [event.at for event in events if isinstance(event, StepTrained)]
    return max(later - earlier for earlier, later in itertools.pairwise(times))


def test_nodes_join_and_leave_ten_times() -> None:
    """Engines follow, no trajectory is lost, and the trainer never waits for longer than a slow step without it."""
    alone = tables()
    alone["sim"]["nodes"] = [{"pool": "fast"}]
    calm = run(alone)
    made = tables()
    # Every other node leaves with notice, the others die.
    made["sim"]["nodes"] = [{"pool": "fast"}] + [
        {"pool": "wide", "engines": 1 + number % 3, "from_s": 10.0 * number, "until_s": 10.0 * number + 7.0}
        | ({"notice_s": 3.0} if number % 2 else {})
        for number in range(10)
    ]
    done = run(made)
    assert len(of_kind(done, StepTrained)) == STEPS
    assert [room.engines > 0 for room in of_kind(done, RoomChanged) if room.pool == "wide"].count(True) >= 10
    changes = of_kind(done, EnginesChanged)
    assert {change.pool for change in changes} == {"wide"}
    grown = [change for change in changes if change.after > change.before]
    assert len(grown) >= 9
    assert all(change.cause is ElasticCause.NODES for change in changes)
    lost = [event for event in of_kind(done, TrajectoryEnded) if event.outcome is Outcome.ENGINE_FAILED]
    assert not lost
    assert not [event for event in of_kind(done, WorkerLeft) if event.unfinished]
    assert longest_step_s(done.events) <= 2 * longest_step_s(calm.events)


def test_a_pool_is_as_large_as_training_needs() -> None:
    """Rollout is slow: the pool grows; training is slow: it shrinks."""
    made = tables(mode="one_off")
    made["pools"] = {"fast": {"engines": {"min": 1, "max": 4, "start": 1}}, "wide": {"engines": 0}}
    made["elasticity"] |= {"hold_s": 5.0, "min_wait": 0.1}
    made["pools"]["fast"]["inject"] = [{"prefill": 30.0, "decode": 30.0}]
    for task in made["tasks"].values():
        task["hardware"] = "fast"
    grown = of_kind(run(made), EnginesChanged)
    assert grown[0].cause is ElasticCause.ROLLOUT
    assert max(change.after for change in grown) >= 3

    made["pools"]["fast"] = {"engines": {"min": 1, "max": 4, "start": 4}}
    made["sim"]["trainer"]["ranks"] = 1
    made["sim"]["trainer"]["hardware"] = "slow"
    made["sim"]["hardware"] = {"slow": slow_trainer()}
    shrunk = of_kind(run(made), EnginesChanged)
    assert shrunk[0].cause is ElasticCause.TRAINING
    assert shrunk[0].after < shrunk[0].before == 4


def slow_trainer() -> dict[str, Any]:
    return {"name": "slow", "tflops": 0.02, "hbm_gb": 96.0, "hbm_tb_s": 4.0, "nvlink_gb_s": 900.0, "cost": 1.0}


def test_the_report_has_a_sentence_for_every_elastic_pool() -> None:
    made = tables()
    made["sim"]["nodes"] = [{"pool": "fast"}, {"pool": "wide", "engines": 2, "from_s": 5.0}]
    report = make_report(run(made).events)
    assert report.elasticity == {"wide": "wide 0 → 2: its nodes have had room for 2 engines for 2 s"}
    assert report.resizes == 2
