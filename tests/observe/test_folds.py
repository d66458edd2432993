"""Audit and report as folds: they can stop anywhere and go on, and remember no more than they need."""

import random

import msgspec
import pytest
from journals import SEEDS, troubled

from rollart.observe.audit import MAX_LISTED, Auditor, audit, versions
from rollart.observe.folds import FORMAT, Folds, check_format, decode_folds
from rollart.observe.report import LATE, Report, make_report
from rollart.sim.crashes import run_world
from rollart.sim.fuzz import make_world
from rollart.sim.run import simulate
from rollart.sim.scenario import load_scenario
from rollart.types import journal as j
from rollart.types.errors import InvariantBroken, RequestError
from rollart.types.ids import TrajectoryId, WorkerId

WORLDS = tuple(range(12))


def close(one: object, other: object) -> bool:
    """Equal but for the order in which floats were added."""
    if isinstance(one, float) and isinstance(other, float):
        return one == pytest.approx(other, rel=1e-12, abs=1e-12)
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(close(one[key], other[key]) for key in one)
    return one == other


def in_pieces(events: list[j.JournalEvent], cuts: list[int]) -> Folds:
    """The folds of a journal, written down and read again at every cut."""
    folds = Folds()
    for number, event in enumerate(events):
        if number in cuts:
            folds = decode_folds(folds.encode())
        folds.take(event)
    return folds


@pytest.mark.parametrize("seed", SEEDS)
def test_folds_that_were_written_down_go_on_as_if_nothing_had_happened(seed: int) -> None:
    events = list(troubled(seed))
    dice = random.Random(seed)
    for count in (1, 10, 100):
        folds = in_pieces(events, dice.sample(range(len(events)), count))
        assert folds.auditor.count == len(events)
        assert folds.finish() == ([], make_report(events))


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_written_down_is_everything(seed: int) -> None:
    """At many events: the folds and their copy are equal, field by field, so nothing is kept on the side."""
    folds = Folds()
    for number, event in enumerate(troubled(seed)):
        folds.take(event)
        if number % 50 == 0:
            assert decode_folds(folds.encode()) == folds


@pytest.mark.parametrize("seed", WORLDS)
def test_what_the_report_forgets_is_not_missed(seed: int) -> None:
    """Without checkpoints nothing is settled before the end: the figures are the same."""
    events = run_world(make_world(seed)).events
    settled = make_report(events)
    kept = make_report(event for event in events if not isinstance(event, j.CheckpointSaved))
    assert close(msgspec.to_builtins(settled), msgspec.to_builtins(kept))
    assert LATE not in settled.wasted_tokens


def test_the_folds_do_not_grow_with_the_journal() -> None:
    small = ["batch.trajectories=16", "batch.group_size=4", "steps=80", "checkpoint_every=2"]
    done = simulate(load_scenario("laptop", [*small, "sim.tasks.frozenlake.step_failure=0.02"]))
    folds, sizes = Folds(), []
    for event in done.events:
        folds.take(event)
        if isinstance(event, j.Snapshot):
            sizes.append(len(folds.encode()))
    assert len(sizes) == 40
    assert max(sizes[20:]) < 1.3 * max(sizes[5:20])


def test_dead_workers_and_old_versions_are_forgotten() -> None:
    """What an auditor knows of engines is about those that live, however many there were before them."""
    done = simulate(load_scenario("laptop", ["batch.trajectories=16", "batch.group_size=4", "steps=30"]))
    auditor = Auditor()
    for event in done.events:
        auditor.take(event)
        if isinstance(event, j.WeightsSynced):
            assert len(auditor.published) <= 2
            assert all(len(engine.had) <= 3 for engine in auditor.engines.values())
    for incarnation in range(1, 100):
        worker = WorkerId(f"engine/fast/0.{incarnation}")
        auditor.take(j.WorkerSpawned(0.0, worker, j.Role.ENGINE, "fast"))
        auditor.take(j.WorkerDied(0.0, worker, "killed", "restarted"))
    versions.forget_versions(auditor)
    assert WorkerId("engine/fast/0.98") not in auditor.engines
    assert sum(worker.startswith("engine/fast/0.") for worker in auditor.roles) == 1
    auditor.take(j.WorkerSpawned(0.0, WorkerId("engine/fast/0.7"), j.Role.ENGINE, "fast"))
    assert "started twice" in auditor.violations[-1].what


def test_a_turn_that_is_reported_after_all_is_settled_counts_as_waste() -> None:
    events = list(troubled(SEEDS[0]))
    before = make_report(events)
    late = j.TurnAborted(events[-1].at, TrajectoryId(0), WorkerId("engine/fast/0.0"), 13)
    after = make_report([*events[:-1], late, events[-1]])
    assert after.wasted_tokens == dict(sorted((before.wasted_tokens | {LATE: 13}).items()))
    assert after.sampled_tokens == before.sampled_tokens + 13


def test_a_fault_at_every_event_is_listed_up_to_a_limit() -> None:
    events: list[j.JournalEvent] = [j.RunStarted(0.0, "", "rollart", 0, 0, {}, 1)]
    events += [j.StallReported(1.0, ())] * (MAX_LISTED + 5)
    auditor = Auditor()
    for event in events:
        auditor.take(event)
    assert len(auditor.finish()) == MAX_LISTED
    assert auditor.unlisted == 5


def test_a_journal_with_holes_has_no_figures() -> None:
    events = list(troubled(SEEDS[0]))
    first = next(number for number, event in enumerate(events) if isinstance(event, j.TrajectoryStarted))
    holed = events[:first] + events[first + 1 :]
    violations, report = in_pieces(holed, [first + 40, first + 80]).finish()
    assert report is None
    assert violations == audit(holed) != []


def test_a_report_that_fails_on_a_sound_journal_is_a_bug() -> None:
    with pytest.raises(InvariantBroken, match="bug of rollart"):
        Folds(report=None).finish()
    assert Folds().finish() == ([], Report())


def test_another_format_is_refused() -> None:
    check_format(FORMAT)
    with pytest.raises(RequestError, match=f"in format {FORMAT + 1}.*reads formats .* to {FORMAT};"):
        check_format(FORMAT + 1)
