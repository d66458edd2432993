"""The live view: what it shows of a journal, and that it leaves the journal as it is."""

import asyncio
import io

import pytest
from rich.console import Console

from rollart.app.progress import mishap
from rollart.app.view import LiveView
from rollart.observe.journal import MemoryJournal
from rollart.types import journal as j
from rollart.types.ids import ClaimId, GroupId, PromptId, TrajectoryId, WorkerId
from rollart.types.trajectory import Outcome, Purpose
from rollart.types.versions import Version

V0 = Version(0, 0)


def step(number, at, reward):
    """A step on a batch of half the reward that its trajectory finished with."""
    claim, trajectory = ClaimId(number), TrajectoryId(10 + number)
    return [
        j.GroupOpened(at, GroupId(number), "maze", PromptId(0), Purpose.TRAIN, 0, 0),
        j.TrajectoryStarted(at, trajectory, GroupId(number), 0, 0, "slot"),
        j.TrajectoryEnded(at, trajectory, Outcome.COMPLETED, 1, 3, reward),
        j.BatchClaimed(
            at, claim, number, V0, V0, (GroupId(1),), (TrajectoryId(1),), (1,), (1,), (), {"maze": reward / 2}
        ),
        j.StepTrained(at, claim, Version(0, number), 1.0, {}),
        j.PoolTime(at, "local", {"busy": 9.0, "rollout": 1.0}),
    ]


JOURNAL = [
    j.RunStarted(0.0, "run", "rollart", 1, 0, {"maze": 1}, 1),
    j.TrajectoryStarted(0.0, TrajectoryId(1), GroupId(1), 0, 0, "slot"),
    j.TrajectoryStarted(0.0, TrajectoryId(2), GroupId(1), 0, 0, "slot"),
    j.TrajectoryEnded(1.0, TrajectoryId(1), Outcome.ENV_FAILED, 1, 3),
    *step(1, 10.0, 0.25),
    j.EvalEnded(11.0, "maze", 1, 8, 8, 0.5),
    *step(2, 20.0, 0.75),
    j.WorkerDied(21.0, WorkerId("engine/local/0"), "killed [9]", "it is replaced"),
]


def test_where_a_run_stands():
    out = io.StringIO()
    console = Console(file=out, width=110, force_terminal=False)
    journal = MemoryJournal()
    view = LiveView(journal, console, "first", 10)
    for event in JOURNAL:
        view.append(event)
    with console.capture() as capture:
        console.print(view.render())
    asyncio.run(view.close())
    assert journal.events == JOURNAL
    shown = capture.get()
    for part in (
        "step 2/10",
        "1:20 left",
        "maze",
        "0.750",
        "▁█",
        "0.375",
        "0.500 → 0.500",
        "local 90%",
        "env_failed 1",
    ):
        assert part in shown
    assert "engine/local/0 died: killed [9] (it is replaced)" in out.getvalue()


@pytest.mark.parametrize(
    ("until", "reason", "line"),
    [
        (5060.0, "no image", "maze/0#1 is set aside for 60 s: no image"),
        (-1.0, "given up: no image", "maze/0#1 is set aside: given up: no image"),
    ],
)
def test_how_long_a_part_is_set_aside(until, reason, line):
    """Not until when: the clock of a run is that of its machine."""
    assert mishap(j.Quarantined(5000.0, "maze/0#1", 3, until, reason)) == line


def test_trajectories_of_an_earlier_controller_are_not_running_here():
    """A resume reports their end."""
    console = Console(file=io.StringIO(), width=80)
    view = LiveView(MemoryJournal(), console, "first", 10)
    for trajectory in (7, 8):
        view.append(j.TrajectoryEnded(1.0, TrajectoryId(trajectory), Outcome.CANCELLED, 1, 3))
    view.append(JOURNAL[1])
    with console.capture() as capture:
        console.print(view.render())
    asyncio.run(view.close())
    assert "\n1 agents running" in capture.get()


def test_names_are_no_markup():
    console = Console(file=io.StringIO(), width=110)
    view = LiveView(MemoryJournal(), console, "a[/b]", 10)
    for event in step(1, 10.0, 0.25):
        view.append(event)
    view.append(j.EvalEnded(11.0, "[/maze]", 1, 8, 8, 0.5))
    with console.capture() as capture:
        console.print(view.render())
    asyncio.run(view.close())
    assert "a[/b]" in capture.get()


def test_before_the_first_step():
    console = Console(file=io.StringIO(), width=80)
    view = LiveView(MemoryJournal(), console, "first", 10)
    view.append(JOURNAL[0])
    view.append(JOURNAL[1])
    with console.capture() as capture:
        console.print(view.render())
    asyncio.run(view.close())
    assert "1 agents running, no step yet" in capture.get()
