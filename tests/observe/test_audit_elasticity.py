"""Rule 10: a journal of elastic pools is clean, and no decision can be changed in it unnoticed."""

from collections.abc import Callable, Sequence
from functools import cache

import pytest
from msgspec.structs import replace

from rollart.observe.audit import audit
from rollart.sim.fuzz import make_world
from rollart.sim.run import simulate
from rollart.sim.scenario import parse_scenario
from rollart.types.elasticity import ElasticCause
from rollart.types.journal import EnginesChanged, JournalEvent, RoomChanged, WorkerLeaves, WorkerLeft

Events = list[JournalEvent]


@cache
def journal() -> tuple[JournalEvent, ...]:
    """A run in which a pool has room for two engines, for none and for two again, and another grows for the trainer."""
    made = make_world(16).tables
    made |= {"steps": 30, "mode": "one_off", "alpha": 1, "eval_every": 0}
    made["pools"] = {
        "fast": {"engines": {"min": 1, "max": 3, "start": 1}, "inject": [{"prefill": 30.0, "decode": 30.0}]},
        "wide": {"engines": {"min": 0, "max": 2, "start": 0}},
    }
    made["elasticity"] = {"confirm_s": 2.0, "min_wait": 0.1, "hold_s": 5.0}
    for task in made["sim"]["tasks"].values():
        task.update(reset_failure=0.0, step_failure=0.0)
    made["sim"]["nodes"] = [
        {"pool": "fast", "engines": 3},
        {"pool": "wide", "engines": 2, "until_s": 12.0, "notice_s": 4.0},
        {"pool": "wide", "engines": 2, "from_s": 16.0},
    ]
    done = simulate(parse_scenario(made))
    assert done.error is None
    return tuple(done.events)


def changes(events: Sequence[JournalEvent]) -> list[tuple[int, EnginesChanged]]:
    return [(number, event) for number, event in enumerate(events) if isinstance(event, EnginesChanged)]


def altered(alter: Callable[[EnginesChanged], EnginesChanged], *, cause: ElasticCause, grows: bool) -> Events:
    """The journal with the first such decision changed."""
    events = list(journal())
    number, event = next(
        (number, event)
        for number, event in changes(events)
        if event.cause is cause and (event.after > event.before) == grows
    )
    events[number] = alter(event)
    return events


def broken(events: Sequence[JournalEvent]) -> set[int]:
    return {violation.rule for violation in audit(events)}


def test_the_journal_itself_is_clean() -> None:
    assert not audit(journal())
    assert {(event.cause, event.after > event.before) for _, event in changes(journal())} >= {
        (ElasticCause.NODES, True),
        (ElasticCause.NODES, False),
    }


@pytest.mark.parametrize("grows", [True, False])
@pytest.mark.parametrize(
    "alter",
    [
        lambda event: replace(event, after=event.after + 1),
        lambda event: replace(event, before=event.before + 1),
        lambda event: replace(event, since=event.since - 1.0),
        lambda event: replace(event, since=event.at),
        lambda event: replace(event, changed=event.changed[:-1]),
        lambda event: replace(event, changed=("engine/wide/7", *event.changed[1:])),
        lambda event: replace(event, figures=replace(event.figures, room=7)),
        lambda event: replace(event, cause=ElasticCause.TRAINER),
        lambda event: replace(event, cause=ElasticCause.TRAINING),
        lambda event: replace(event, cause=ElasticCause.FAILED),
    ],
    ids=["after", "before", "longer", "at once", "fewer", "others", "room", "trainer", "training", "failed"],
)
def test_a_decision_follows_from_its_figures(alter: Callable[[EnginesChanged], EnginesChanged], grows: bool) -> None:
    assert 10 in broken(altered(alter, cause=ElasticCause.NODES, grows=grows))


def test_nothing_starts_without_a_decision() -> None:
    number = next(number for number, event in changes(journal()) if event.after > event.before)
    events = list(journal())
    del events[number]
    assert 10 in broken(events)


def test_a_removed_engine_has_to_drain() -> None:
    events = list(journal())
    number = next(number for number, event in changes(events) if event.after < event.before)
    del events[number + 1 : number + 2]
    assert isinstance(journal()[number + 1], WorkerLeaves)
    assert 10 in broken(events)


def test_engines_that_are_removed_together_leave_one_after_the_other() -> None:
    """Real time passes between the decision and its last consequence."""
    events = list(journal())
    number, removed = next((n, e) for n, e in changes(events) if e.before - e.after == 2)
    late = [n for n, e in enumerate(events) if n > number and isinstance(e, WorkerLeaves | WorkerLeft)]
    for step, position in enumerate(late[:4]):
        assert events[position].at >= removed.at
        events[position] = replace(events[position], at=events[position].at + 0.001 * (step + 1))
    assert 10 not in broken(events)


def test_a_removed_engine_is_not_stopped_before_its_time() -> None:
    events = list(journal())
    number = next(number for number, event in enumerate(events) if isinstance(event, WorkerLeft))
    left = events[number]
    assert isinstance(left, WorkerLeft)
    events[number] = replace(left, unfinished=True)
    assert 10 in broken(events)


def test_a_pool_does_not_stay_behind_its_nodes() -> None:
    """Without the decision to grow, and the engines that it started."""
    events = list(journal())
    _, grown = next((n, e) for n, e in changes(events) if e.after > e.before == 0 and e.pool == "wide")
    room = next(n for n, e in enumerate(events) if isinstance(e, RoomChanged) and e.pool == "wide" and e.engines)
    events = [*events[: room + 1], replace(events[-1], at=events[room].at + grown.at + 60.0)]
    assert 10 in broken(events)
