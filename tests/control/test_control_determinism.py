"""The same seed gives the same journal, in any process; and a run leaves nothing behind."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from audit import completed, sound
from worlds import MODES, Events, Kill, KillAtCommand, Ran, Rule, Silent, SlowSink, run, two_tasks, world

from rollart.observe.journal import digest
from rollart.types.journal import RunEnded
from rollart.types.messages import Scored, ScoreFailed, Train

FAULTS = (
    "eval_every=2",
    "tasks.game.eval_episodes=2",
    "deadlines.engine_silent_s=3",
    "sim.tasks.game.reset_failure=0.05",
    "sim.tasks.math.step_failure=0.05",
    "batch.extra_members=1",
    "steps=5",
)


def rules() -> list[Rule]:
    return [
        Kill("engine/wide/0", 0.8),
        Silent("engine/fast/0.0", 1.1),
        Kill("environment/game/0", 1.4),
        Events("reward", Scored, lambda _, e, n: (ScoreFailed(e.key, "429"),) if n % 5 == 0 else (e,)),
    ]


def faulty(mode: str, seed: int = 7) -> Ran:
    return run(two_tasks(f"mode={mode}", f"seed={seed}", *FAULTS), *rules(), sink=SlowSink(0.1))


@pytest.mark.parametrize("mode", MODES)
def test_the_same_seed_gives_the_same_journal(mode: str) -> None:
    first, second = faulty(mode), faulty(mode)
    completed(first)
    assert digest(first.events) == digest(second.events)
    assert digest(faulty(mode, seed=8).events) != digest(first.events)


def test_the_journal_is_the_same_in_every_process() -> None:
    here = {mode: digest(faulty(mode).events) for mode in MODES}
    for hash_seed in ("1", "4242"):
        child = subprocess.run(
            [sys.executable, "-c", "import test_control_determinism as t; t.print_digests()"],
            cwd=Path(__file__).parent,
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert dict(line.split() for line in child.stdout.splitlines()) == here


def print_digests() -> None:
    """What the other processes of the test above run."""
    for mode in MODES:
        sys.stdout.write(f"{mode} {digest(faulty(mode).events)}\n")


@pytest.mark.parametrize("mode", MODES)
def test_a_run_leaves_no_task_and_no_wait_behind(mode: str) -> None:
    ran = run(two_tasks(f"mode={mode}", "eval_every=2", "tasks.game.eval_episodes=2"))
    completed(ran)
    assert ran.context.waits.report() == []
    assert len(ran.context.nursery) == 0
    assert isinstance(ran.events[-1], RunEnded)


@pytest.mark.parametrize("mode", MODES)
def test_a_run_that_fails_leaves_no_task_behind_either(mode: str) -> None:
    ran = run(world(f"mode={mode}"), KillAtCommand("trainer", Train, 1, incarnations=99))
    sound(ran)
    assert ran.error is not None
    assert len(ran.context.nursery) == 0
    assert isinstance(ran.events[-1], RunEnded)
