"""Rule 9 of the audit: a journal in which the automatic affinity did not keep its rules does not pass."""

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from rollart.observe.audit import audit
from rollart.sim.run import simulate
from rollart.sim.scenario import load_scenario
from rollart.types import journal as j
from rollart.types.affinity import AffinityCause

Journal = list[j.JournalEvent]
SMALL = (
    "batch.trajectories=32",
    "batch.group_size=4",
    "steps=8",
    "tasks.frozenlake.hardware=auto",
    "tasks.math.hardware=auto",
    "affinity.confirm_s=1.0",
    "affinity.hold_s=4.0",
)


@pytest.fixture(scope="module")
def clean() -> Journal:
    """A run whose tasks find their classes once, and whose trajectories measure them."""
    done = simulate(load_scenario("laptop", SMALL))
    assert done.error is None
    assert [event.cause for event in done.events if isinstance(event, j.AffinityChanged)] == [AffinityCause.MEASURED]
    return done.events


def test_a_sound_journal_passes(clean: Journal) -> None:
    assert audit(clean) == []


def tampered(clean: Journal, kind: type, change: Callable[[Any], Any]) -> list[str]:
    """What rule 9 finds if the events of a kind are changed."""
    events = [change(event) if isinstance(event, kind) else event for event in clean]
    return [violation.what for violation in audit(events) if violation.rule == 9]


def other(name: str) -> str:
    return {"fast": "wide", "wide": "fast"}[name]


def other_classes(event: j.AffinityChanged) -> j.AffinityChanged:
    return replace(event, assigned={task: other(name) for task, name in event.assigned.items()})


def more_engines(event: j.AffinityChanged) -> j.AffinityChanged:
    sizes = tuple(replace(size, engines=size.engines + 1) for size in event.figures.classes)
    return replace(event, figures=replace(event.figures, classes=sizes))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda event: replace(event, before={"math": "fast"}), "the assignment before is given as"),
        (lambda event: replace(event, why={}), "changed, explained are none"),
        (lambda event: replace(event, score=event.score * 1.001), "the score is given as"),
        (lambda event: replace(event, assigned={**event.assigned, "math": "huge"}), "which it cannot use"),
        (lambda event: replace(event, cause=AffinityCause.GAIN), "moved for too little"),
        (lambda event: replace(event, cause=AffinityCause.LOST), "left  as lost"),
        (other_classes, "would be better on"),
        (more_engines, "engines are"),
    ],
)
def test_a_decision_that_does_not_follow_from_its_figures(
    clean: Journal, change: Callable[[Any], Any], words: str
) -> None:
    found = tampered(clean, j.AffinityChanged, change)
    assert any(words in what for what in found), found


def test_a_decision_of_a_run_without_automatic_affinity(clean: Journal) -> None:
    found = tampered(clean, j.RunStarted, lambda event: replace(event, affinity=None))
    assert found == ["tasks were assigned, but this run has no automatic affinity"]


def test_a_declared_class_that_did_not_win(clean: Journal) -> None:
    def declare(event: j.RunStarted) -> j.RunStarted:
        assert event.affinity is not None
        return replace(event, affinity=replace(event.affinity, declared={"math": "fast"}))

    found = tampered(clean, j.RunStarted, declare)
    assert any(what == "math was assigned to wide, but it declares fast" for what in found)
    assert any(what == "math runs on wide instead of fast without a reason" for what in found)


def test_placements_that_do_not_follow_the_assignment(clean: Journal) -> None:
    found = tampered(clean, j.Placed, lambda event: replace(event, hardware=other(event.hardware), reason=""))
    assert any("without a reason" in what for what in found)


def test_more_exploration_than_promised(clean: Journal) -> None:
    found = tampered(clean, j.Placed, lambda event: replace(event, reason=f"{event.hardware} is measured"))
    assert any("were spent on measuring" in what for what in found)


def test_a_task_that_stays_on_a_class_without_engines(clean: Journal) -> None:
    """All engines of one class die, and nothing is done about it."""
    (decided,) = [index for index, event in enumerate(clean) if isinstance(event, j.AffinityChanged)]
    at = clean[decided].at
    gone = [j.WorkerDied(at, event.worker, "test", "none") for event in clean if is_wide(event)]
    found = [each.what for each in audit([*clean[: decided + 1], *gone, *clean[decided + 1 :]]) if each.rule == 9]
    assert any("stayed on wide" in what for what in found)


def is_wide(event: j.JournalEvent) -> bool:
    return isinstance(event, j.WorkerJoined) and event.worker.startswith("engine/wide/")
