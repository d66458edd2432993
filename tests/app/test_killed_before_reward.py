"""SIGKILL while rewards are being computed: the resumed run trains every prompt once and counts every reward once."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from real_cli import rollart, small_task
from reward_server import RewardServer, hang
from test_interruption import PATIENCE_S, running

from rollart.observe.journal import fold_journal, read_journal
from rollart.types.journal import RunResumed, StepTrained, TrajectoryEnded
from rollart.types.trajectory import TRAINABLE, Outcome

pytestmark = pytest.mark.timeout(1200)
STEPS = 3
REWARDS = """
[[tasks.maze.rewards]]
function = "maze.py:judged"
run = "{url}"

[[tasks.maze.rewards]]
function = "maze.py:longest"
weight = 0.5
"""
LONGEST = """
import rollart


def longest(group: list[rollart.Transcript]) -> list[float]:
    lengths = [len(t.final_text) for t in group]
    return [float(length == max(lengths)) for length in lengths]
"""


@pytest.mark.parametrize("runtime", ["inline", pytest.param("ray", marks=pytest.mark.long)])
def test_a_run_that_is_killed_between_episode_and_reward(tmp_path: Path, runtime: str) -> None:
    if runtime == "ray":
        pytest.importorskip("ray", reason="Ray is not installed: pip install 'rollart[ray]'")
    small_task(tmp_path)
    with (tmp_path / "maze.py").open("a") as file:
        file.write(LONGEST)
    asked = threading.Event()

    async def after_the_first_step(number, seen):  # type: ignore[no-untyped-def]  # noqa: ARG001
        """A batch of 8 is answered, then some of its successors; then nothing more."""
        if number < 11:
            return None
        asked.set()
        return await hang()

    with RewardServer(f"{tmp_path / 'maze.py'}:judged", after_the_first_step) as server:
        config = tmp_path / "config.toml"
        config.write_text(config.read_text().replace("steps = 2", f"steps = {STEPS}") + REWARDS.format(url=server.url))
        with running(tmp_path, "--runtime", runtime) as process:
            deadline = time.monotonic() + PATIENCE_S
            while not asked.wait(0.1):
                assert process.poll() is None, (tmp_path / "err").read_text()
                assert time.monotonic() < deadline
            os.kill(process.pid, signal.SIGKILL)
            process.wait()

        async def behave(number, seen):  # type: ignore[no-untyped-def]  # noqa: ARG001
            return None

        server.misbehave = behave
        resumed = rollart("train", "--resume", "run", "--runtime", runtime, cwd=tmp_path, timeout_s=PATIENCE_S)
        assert resumed.code == 0, resumed.err
    audited = rollart("audit", "run", cwd=tmp_path)
    assert audited.code == 0, audited.out + audited.err

    journal = tmp_path / "run" / "journal.sqlite"
    assert fold_journal(journal)[1].finish()[0] == []
    events = list(read_journal(journal))
    killed = next(index for index, event in enumerate(events) if isinstance(event, RunResumed))
    ended = [event for event in events if isinstance(event, TrajectoryEnded)]
    assert len({event.trajectory for event in ended}) == len(ended)
    at_resume = {event.outcome for event in events[killed:] if isinstance(event, TrajectoryEnded)}
    assert Outcome.CANCELLED in at_resume, "those that waited for their rewards"
    assert {event.outcome for event in ended} <= TRAINABLE | {Outcome.CANCELLED, Outcome.REDUNDANT, Outcome.STALE}
    assert [event.version.step for event in events if isinstance(event, StepTrained)][-1] == STEPS
