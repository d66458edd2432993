"""Workers of a real run that are killed or frozen: others take over in time, and no wrong sample is trained."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from real_cli import COMMAND, rollart, small_task
from test_ray_lost import children, started, wait_until

from rollart.observe.journal import read_journal
from rollart.types.errors import RequestError
from rollart.types.journal import (
    EngineUpdated,
    JournalEvent,
    RunEnded,
    StepTrained,
    TrajectoryEnded,
    TurnEnded,
    WorkerDied,
    WorkerJoined,
)
from rollart.types.trajectory import Outcome

pytest.importorskip("ray", reason="Ray is not installed: pip install 'rollart[ray]'")

KILLED_S, FROZEN_S, NONE_LEFT_S = 15.0, 30.0, 60.0
"""Within what time the loss of an engine must be noticed, by the faults that a run must survive."""
PATIENCE_S = 200.0


class Run:
    def __init__(self, folder: Path, controller: "subprocess.Popen[bytes]") -> None:
        self._folder = folder
        self._controller = controller

    def events(self) -> list[JournalEvent]:
        try:
            return list(read_journal(self._folder / "run" / "journal.sqlite"))
        except RequestError:  # it has no tables yet
            return []

    def log(self) -> str:
        return (self._folder / "log").read_text()

    def until(self, condition: Callable[[list[JournalEvent]], object], limit_s: float = PATIENCE_S) -> float:
        """Wait for a condition of the journal while the run goes on; returns the seconds that it took."""
        began = time.monotonic()

        def met() -> object:
            assert self._controller.poll() is None, self.log()
            return condition(self.events())

        wait_until(met, limit_s)
        return time.monotonic() - began

    def until_steps(self, more: int) -> None:
        wanted = steps(self.events()) + more
        self.until(lambda events: steps(events) >= wanted)

    def process(self, title: str) -> int:
        (pid,) = [pid for pid, each in children(self._controller.pid).items() if each == f"rollart: {title}"]
        return pid

    def processes(self, start: str) -> list[int]:
        return [pid for pid, each in children(self._controller.pid).items() if each.startswith(f"rollart: {start}")]

    def over(self) -> int | None:
        return self._controller.poll()

    def finish(self) -> list[JournalEvent]:
        """Stop it in order; the journal must be clean."""
        self._controller.send_signal(signal.SIGTERM)
        self._controller.wait(PATIENCE_S)
        audit = rollart("audit", "run", cwd=self._folder)
        assert audit.code == 0, audit.out
        return self.events()


@contextmanager
def running(folder: Path, *changes: str) -> Iterator[Run]:
    small_task(folder)
    sets = [word for change in ("steps=100000", "checkpoint_every=5", *changes) for word in ("--set", change)]
    with (folder / "log").open("wb") as log:
        words = [*COMMAND, "train", "config.toml", "--out", "run", "--json", *sets]
        controller = subprocess.Popen(words, cwd=folder, stdout=subprocess.DEVNULL, stderr=log)
    try:
        yield Run(folder, controller)
    finally:
        controller.kill()
        controller.wait()


def steps(events: list[JournalEvent]) -> int:
    return sum(isinstance(event, StepTrained) for event in events)


def died(events: list[JournalEvent], worker: str) -> bool:
    return any(isinstance(event, WorkerDied) and event.worker == worker for event in events)


def turns(events: list[JournalEvent], worker: str) -> int:
    return sum(isinstance(event, TurnEnded) and event.engine == worker for event in events)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_engines_and_environments_that_are_killed_or_frozen(tmp_path: Path) -> None:
    two = ("pools.local.engines=2", "tasks.maze.environments_per_worker=4", "tasks.maze.inject={latency_ms=50.0}")
    with running(tmp_path, *two) as run:
        run.until(lambda events: turns(events, "engine/local/0.0") and turns(events, "engine/local/1.0"))
        run.until_steps(2)

        frozen = run.process("engine local/0.0")
        os.kill(frozen, signal.SIGSTOP)
        assert run.until(lambda events: died(events, "engine/local/0.0")) <= FROZEN_S
        run.until(lambda events: turns(events, "engine/local/0.1"))
        wait_until(lambda: started(frozen) is None)
        run.until_steps(2)

        os.kill(run.process("engine local/1.0"), signal.SIGKILL)
        assert run.until(lambda events: died(events, "engine/local/1.0")) <= KILLED_S
        run.until(lambda events: turns(events, "engine/local/1.1"))
        run.until_steps(2)

        os.kill(run.process("environment maze/0.0"), signal.SIGKILL)
        run.until(lambda events: died(events, "environment/maze/0.0"))
        run.until(
            lambda events: any(isinstance(e, WorkerJoined) and e.worker == "environment/maze/0.1" for e in events)
        )
        run.until_steps(2)
        events = run.finish()

    # An engine has current weights before its first turn.
    for engine in ("engine/local/0.1", "engine/local/1.1"):
        kinds = [type(e) for e in events if engine in (getattr(e, "worker", ""), getattr(e, "engine", ""))]
        assert kinds.index(EngineUpdated) < kinds.index(TurnEnded)
    # What an engine was generating continues elsewhere; what an environment was playing is no result.
    ends = [event for event in events if isinstance(event, TrajectoryEnded)]
    assert not [event for event in ends if event.outcome is Outcome.ENGINE_FAILED]
    failed = [event for event in ends if event.outcome is Outcome.ENV_FAILED]
    assert failed
    assert all(event.reward is None for event in failed)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_run_whose_engines_keep_dying_ends_with_a_reason(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        run.until(lambda events: steps(events) >= 1)
        began = time.monotonic()

        def kill_all() -> object:
            for pid in run.processes("engine "):
                os.kill(pid, signal.SIGKILL)
            return run.over() is not None

        wait_until(kill_all, PATIENCE_S)
        took_s = time.monotonic() - began
        assert run.over() == 1
        *_, end = run.events()
        log = run.log()
    assert isinstance(end, RunEnded)
    assert "engine" in end.reason
    assert "Traceback" not in log
    assert (
        "Every worker of the role was restarted and died again: fix the cause and resume"
        in log.strip().splitlines()[-1]
    )
    assert took_s <= NONE_LEFT_S
