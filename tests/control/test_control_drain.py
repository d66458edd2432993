"""Workers that leave their node: they finish, others take over, and nothing fails."""

from itertools import pairwise

import pytest
from audit import completed, sound
from worlds import FaultyRuntime, Ran, Rule, run, two_tasks, world

from rollart.types.journal import CheckpointSaved, RolledBack, TrajectoryEnded, WorkerJoined, WorkerLeaves, WorkerLeft
from rollart.types.trajectory import Outcome

MODES = ("sync", "areal", "rollart")


class Drains(Rule):
    """The nodes of all workers of a place drain at these times."""

    def __init__(self, target: str, *at_s: float) -> None:
        self._target = target
        self._at_s = at_s

    def start(self, runtime: FaultyRuntime) -> None:
        for at_s in self._at_s:
            runtime.loop.call_at(at_s, runtime.drain, self._target)


def failures(ran: Ran) -> list[TrajectoryEnded]:
    failed = (Outcome.ENV_FAILED, Outcome.ENGINE_FAILED, Outcome.REWARD_FAILED)
    return [end for end in ran.of(TrajectoryEnded) if end.outcome in failed]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("target", ["engine/wide", "environment", "reward", "trainer", ""])
def test_nothing_fails_when_workers_leave(mode: str, target: str) -> None:
    ran = run(two_tasks(f"mode={mode}", "steps=12"), Drains(target, 3.0, 6.0))
    completed(ran)
    assert ran.of(WorkerLeft)
    assert not any(left.unfinished for left in ran.of(WorkerLeft))
    assert failures(ran) == []


def test_the_successor_of_an_engine_is_there_before_it_leaves_without_work() -> None:
    ran = run(two_tasks("steps=12"), Drains("engine/wide/0", 3.0))
    completed(ran)
    left = ran.of(WorkerLeft)[0]
    assert left.worker == "engine/wide/0.0"
    assert [joined.worker for joined in ran.of(WorkerJoined)].count("engine/wide/0.1") == 1


def test_a_trainer_saves_before_it_leaves_so_no_step_is_lost() -> None:
    ran = run(world("steps=12", "checkpoint_every=100"), Drains("trainer", 3.0))
    completed(ran)
    assert ran.of(RolledBack) == []
    saved = [event for event in ran.of(CheckpointSaved) if event.version.step < 12]
    assert len(saved) == 1
    assert saved[0].at <= ran.of(WorkerLeft)[0].at


def test_a_worker_that_does_not_finish_in_time_is_stopped() -> None:
    ran = run(two_tasks("steps=8", "deadlines.drain_s=0.001"), Drains("environment", 3.0))
    sound(ran)
    assert ran.error is None
    assert any(left.unfinished for left in ran.of(WorkerLeft))


def test_a_worker_leaves_once_however_often_its_node_drains() -> None:
    ran = run(two_tasks("steps=8"), Drains("engine/wide/0", 3.0, 3.0, 3.01))
    completed(ran)
    workers = [event.worker for event in ran.of(WorkerLeaves)]
    assert len(workers) == len(set(workers))
    assert all(earlier != later for earlier, later in pairwise(workers))
