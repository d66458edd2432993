"""Whole runs on nodes: tasks run where their hardware classes say, and go on when nodes die, drain or lose their link.

Every test takes minutes: `make test-long`.
"""

import time

import pytest
from node_runs import Run, now, served
from ray_nodes import RayNodes

from rollart.types.journal import EngineUpdated, StepTrained, TrajectoryEnded, WorkerDied, WorkerLeaves, WorkerPlaced
from rollart.types.trajectory import Outcome

pytestmark = pytest.mark.long

MOVED_S = 15.0
CUT_S, PERIOD_S, CUTS = 5.0, 30.0, 3
ENGINES = {"engine/H800/0.0", "engine/H800/1.0", "engine/H20/0.0"}
FAILED = (Outcome.ENV_FAILED, Outcome.ENGINE_FAILED, Outcome.REWARD_FAILED)


@pytest.fixture
def cluster():
    with RayNodes("cpu", "H800", "H800", "H20") as nodes:
        yield nodes


def test_tasks_move_when_their_nodes_die_and_back_when_one_returns(cluster):
    with Run(cluster) as run:
        run.until(lambda events: {event.worker for event in events if isinstance(event, EngineUpdated)} >= ENGINES)
        began = now(run)
        run.until_steps(5)
        placed = {event.worker: event.node.split()[0] for event in run.events(WorkerPlaced)}
        assert placed.pop("engine/H800/0.0") == placed.pop("engine/H800/1.0") == "H800"
        assert placed.pop("engine/H20/0.0") == "H20"
        assert set(placed.values()) == {"cpu"}
        turns = served(run.events(), began)
        assert turns["long", "H800"] > 0.9 * (turns["long", "H800"] + turns["long", "H20"])
        assert turns["short", "H20"] > 0.9 * (turns["short", "H800"] + turns["short", "H20"])
        steps, killed = run.steps(), now(run)
        for node in cluster.nodes[1:3]:
            node.kill()
        run.until(lambda events: served(events, killed)["long", "H20"], MOVED_S)
        dead = run.until(lambda events: [event for event in events if isinstance(event, WorkerDied)])
        run.until(lambda events: served(events, dead[-1].at)["long", "H20"] > 20)
        run.until_steps(3)
        cluster.nodes[1].start()
        cluster.start_ray(1)
        back = run.until(lambda events: next((e for e in events[::-1] if _is_back(e, dead[-1].at)), None))
        run.until(lambda events: served(events, back.at)["long", "H800"] > 20)
        run.until_steps(3)
        events = run.finish()
    trained = [event.at for event in events if isinstance(event, StepTrained)]
    assert len(trained) >= steps + 6
    assert {event.worker for event in events if isinstance(event, WorkerDied)} == {"engine/H800/0.0", "engine/H800/1.0"}


def _is_back(event, since):
    return isinstance(event, WorkerPlaced) and event.at > since and event.worker.startswith("engine/H800/")


def test_a_link_that_is_cut_again_and_again_only_delays_a_run(cluster):
    with Run(cluster) as run:
        run.until_steps(3)
        for _ in range(CUTS):
            cluster.nodes[1].cut()
            time.sleep(CUT_S)  # the fault itself; nothing is waited for
            cluster.nodes[1].restore()
            time.sleep(PERIOD_S - CUT_S)
            run.until_steps(1)
        events = run.finish()
    assert not [event for event in events if isinstance(event, WorkerDied)]
    assert not [event for event in events if isinstance(event, TrajectoryEnded) and event.outcome in FAILED]


def test_a_node_that_is_terminated_is_drained_and_nothing_fails(cluster):
    with Run(cluster) as run:
        run.until_steps(3)
        cluster.terminate(1)
        run.until_steps(3)
        cluster.terminate(2)
        left = now(run)
        run.until(lambda events: served(events, left)["long", "H20"] > 20)
        run.until_steps(3)
        events = run.finish()
    leaves = {event.worker for event in events if isinstance(event, WorkerLeaves)}
    assert {"engine/H800/0.0", "engine/H800/1.0"} <= leaves
    assert not [event for event in events if isinstance(event, WorkerDied)]
    assert not [event for event in events if isinstance(event, TrajectoryEnded) and event.outcome in FAILED]
