"""The audit believes nothing: a journal that was tampered with in any of these ways does not pass."""

import importlib
import inspect
import pkgutil
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from journals import SEEDS, troubled
from msgspec.structs import replace

from rollart.config.modes import Mode
from rollart.observe import audit as package
from rollart.observe.audit import audit, auditor
from rollart.sim.crashes import run_world
from rollart.sim.fuzz import make_world
from rollart.sim.run import simulate
from rollart.sim.scenario import load_scenario
from rollart.types import journal as j
from rollart.types.failures import StopReason
from rollart.types.trajectory import GroupOutcome, Outcome
from rollart.types.versions import Version

Journal = list[j.JournalEvent]
LOSSY_SEED = 13
"""A world whose groups lose members."""
REPLACING_SEED = 987799
"""A world in which a member is replaced in the instant of an update that takes it past the bound."""


@pytest.fixture(scope="module")
def clean() -> Journal:
    """A run with evaluation, checkpoints, staleness and failed environments in it."""
    small = ["batch.trajectories=32", "batch.group_size=4", "steps=5", "eval_every=2", "checkpoint_every=2"]
    small += ["tasks.frozenlake.eval_episodes=4", "sim.tasks.frozenlake.step_failure=0.02"]
    done = simulate(load_scenario("laptop", small))
    assert done.error is None
    return done.events


def test_a_sound_journal_passes(clean: Journal) -> None:
    assert audit(clean) == []


def test_a_journal_that_is_still_being_written_passes(clean: Journal) -> None:
    """What is open is not yet wrong, at any point."""
    for length in range(1, len(clean), 97):
        assert audit(clean[:length]) == []


def index_of(events: Journal, kind: type, number: int = 0) -> int:
    """Where the event stands; of the ends, only those of trained groups and of completed trajectories count."""

    def counts(event: j.JournalEvent) -> bool:
        if isinstance(event, j.GroupEnded):
            return event.outcome is GroupOutcome.TRAINED
        return not isinstance(event, j.TrajectoryEnded) or event.outcome is Outcome.COMPLETED

    return [index for index, event in enumerate(events) if isinstance(event, kind) and counts(event)][number]


REMOVED = [
    j.RunStarted,
    j.EpochStarted,
    j.VersionPublished,
    j.WorkerSpawned,
    j.WorkerJoined,
    j.EngineUpdated,
    j.PromptTaken,
    j.GroupOpened,
    j.TrajectoryStarted,
    j.Placed,
    j.TurnEnded,
    j.RewardArrived,
    j.TrajectoryEnded,
    j.GroupEnded,
    j.BatchClaimed,
    j.StepTrained,
    j.CheckpointSaved,
    j.WeightsSynced,
]


@pytest.mark.parametrize("kind", REMOVED, ids=lambda kind: kind.__name__)
def test_an_event_is_removed(clean: Journal, kind: type) -> None:
    index = index_of(clean, kind)
    assert audit(clean[:index] + clean[index + 1 :])


# Of these a second one says nothing new.
SAID_AGAIN = (j.Placed, j.WorkerJoined, j.EngineUpdated, j.CheckpointSaved, j.WeightsSynced)
DOUBLED = [kind for kind in REMOVED if kind not in SAID_AGAIN]


@pytest.mark.parametrize("kind", DOUBLED, ids=lambda kind: kind.__name__)
def test_an_event_is_doubled(clean: Journal, kind: type) -> None:
    index = index_of(clean, kind)
    assert audit([*clean[: index + 1], *clean[index:]])


def test_every_single_trajectory_end_matters(clean: Journal) -> None:
    ends = [index for index, event in enumerate(clean) if isinstance(event, j.TrajectoryEnded)]
    for index in ends[::7]:
        assert audit(clean[:index] + clean[index + 1 :])


def test_every_single_sync_and_checkpoint_matters(clean: Journal) -> None:
    kinds = (j.WeightsSynced, j.CheckpointSaved)
    found = [index for index, event in enumerate(clean) if isinstance(event, kinds)]
    assert len(found) > 6
    for index in found:
        assert audit(clean[:index] + clean[index + 1 :])


def test_a_trainer_comes_back_from_its_last_checkpoint() -> None:
    """Not from an older one, which would make void what is settled; nor from one that nobody trained."""
    events = list(troubled(SEEDS[0]))
    assert audit(events) == []
    saved = index_of(events, j.CheckpointSaved)
    back = next(index for index, event in enumerate(events) if index > saved and isinstance(event, j.EpochStarted))
    for step in (0, 99):
        found = audit([*events[:back], replace(events[back], step=step), *events[back + 1 :]])
        assert any("the last checkpoint is of" in violation.what for violation in found)


def test_an_end_that_is_cut_off_is_no_violation(clean: Journal) -> None:
    assert isinstance(clean[-1], j.RunEnded)
    assert audit(clean[:-1]) == [], "a run may be killed"


def test_two_events_change_places(clean: Journal) -> None:
    started = index_of(clean, j.TrajectoryStarted, 3)
    ended = next(
        index
        for index, event in enumerate(clean)
        if isinstance(event, j.TrajectoryEnded) and event.trajectory == clean[started].trajectory  # type: ignore[union-attr]
    )
    claimed, trained = index_of(clean, j.BatchClaimed, 1), index_of(clean, j.StepTrained, 1)
    for first, second in ((started, ended), (claimed, trained)):
        swapped = list(clean)
        swapped[first], swapped[second] = swapped[second], swapped[first]
        assert audit(swapped)


Change = Callable[[j.JournalEvent], j.JournalEvent]


def altered(events: Journal, kind: type, change: Change, number: int) -> Journal:
    index = index_of(events, kind, number)
    return [*events[:index], change(events[index]), *events[index + 1 :]]


def with_rules(event: j.JournalEvent, **changes: Any) -> j.JournalEvent:
    assert isinstance(event, j.RunStarted)
    assert event.rules is not None
    return replace(event, rules=replace(event.rules, **changes))


ALTERED: dict[str, tuple[type, Change, int]] = {
    "the version of a token": (
        j.TurnEnded,
        lambda e: replace(e, versions=((Version(0, 9), e.sampled),)),  # type: ignore[union-attr]
        5,
    ),
    "the number of sampled tokens": (j.TurnEnded, lambda e: replace(e, sampled=e.sampled + 1), 5),  # type: ignore[union-attr]
    "the number of a turn": (j.TurnEnded, lambda e: replace(e, turn=e.turn + 1), 5),  # type: ignore[union-attr]
    "the engine of a turn": (j.TurnEnded, lambda e: replace(e, engine="engine/fast/9.0"), 5),
    "the version served at a claim": (j.BatchClaimed, lambda e: replace(e, served=Version(0, 4)), 3),
    "the staleness that a claim states": (
        j.BatchClaimed,
        lambda e: replace(e, staleness=(e.staleness[0] + 1, *e.staleness[1:])),  # type: ignore[union-attr]
        2,
    ),
    "a group of a batch": (j.BatchClaimed, lambda e: replace(e, groups=(*e.groups[1:], e.groups[1])), 1),  # type: ignore[union-attr]
    "a trajectory of a batch": (
        j.BatchClaimed,
        lambda e: replace(e, trajectories=(e.trajectories[1], *e.trajectories[1:])),  # type: ignore[union-attr]
        1,
    ),
    "the version that a step led to": (j.StepTrained, lambda e: replace(e, version=Version(0, 4)), 1),
    "the outcome of a trajectory": (j.TrajectoryEnded, lambda e: replace(e, outcome=Outcome.ENV_FAILED), 0),
    "the reward of a trajectory": (j.TrajectoryEnded, lambda e: replace(e, reward=7.0), 0),
    "the first version of a trajectory": (j.TrajectoryEnded, lambda e: replace(e, first=Version(0, 3)), 0),
    "a reward": (j.RewardArrived, lambda e: replace(e, value=float("nan")), 0),
    "the outcome of a group": (j.GroupEnded, lambda e: replace(e, outcome=GroupOutcome.CANCELLED), 0),
    "the requeue of a group": (j.GroupEnded, lambda e: replace(e, requeued=True), 0),
    "a published version": (j.VersionPublished, lambda e: replace(e, version=Version(0, 0)), 1),
    "an epoch": (j.EpochStarted, lambda e: replace(e, epoch=3), 0),
    "the configured shares": (j.RunStarted, lambda e: replace(e, groups_per_batch={"frozenlake": 3, "math": 5}), 0),
    "the bound": (j.RunStarted, lambda e: with_rules(e, alpha=dict.fromkeys(("frozenlake", "math"), 0)), 0),
    "the minimum of a group": (j.RunStarted, lambda e: with_rules(e, min_size=4), 0),
    "the limit of extra members": (j.RunStarted, lambda e: with_rules(e, max_extra=-1), 0),
    "the retries of a stale prompt": (
        j.RunStarted,
        lambda e: with_rules(e, stale_retries=dict.fromkeys(("frozenlake", "math"), 0)),
        0,
    ),
    "the bound of a group": (j.GroupOpened, lambda e: replace(e, alpha=9), 30),
    "the masked members of a batch": (j.TrajectoryEnded, lambda e: replace(e, masked=True), 0),
    "a ticket": (j.PromptTaken, lambda e: replace(e, ticket=e.ticket + 5), 2),  # type: ignore[union-attr]
    "the step of a snapshot": (j.Snapshot, lambda e: replace(e, state=replace(e.state, step=1)), 0),  # type: ignore[union-attr]
    "the prompts of a snapshot": (j.Snapshot, lambda e: replace(e, state=replace(e.state, waiting=(), groups=())), 0),  # type: ignore[union-attr]
    "a time": (j.StepTrained, lambda e: replace(e, at=0.0), 2),
}


@pytest.mark.parametrize("what", ALTERED)
def test_something_is_altered(clean: Journal, what: str) -> None:
    kind, change, number = ALTERED[what]
    assert audit(altered(clean, kind, change, number))


# --- losses ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lossy() -> Journal:
    """A run in which groups lose members to the staleness bound, and prompts get bounds of their own."""
    done = run_world(make_world(LOSSY_SEED, Mode.ROLLART))
    assert done.violations == []
    events = list(done.events)
    kinds = Counter(type(event) for event in events)
    assert kinds[j.MembersLost] > 1
    assert any(isinstance(event, j.MembersLost) and event.alpha is not None for event in events)
    assert any(isinstance(event, j.GroupEnded) and event.outcome is GroupOutcome.STALE for event in events)
    return events


def test_every_loss_is_recorded_once(lossy: Journal) -> None:
    losses = [index for index, event in enumerate(lossy) if isinstance(event, j.MembersLost)]
    assert all(audit([*lossy[: index + 1], *lossy[index:]]) for index in losses), "doubled"
    # One that is missing shows if the group is claimed, or the age of the member is known from an earlier turn.
    assert any(audit(lossy[:index] + lossy[index + 1 :]) for index in losses), "removed"


def test_a_member_that_was_replaced_need_not_be_lost_as_well() -> None:
    """Found by the fuzzer: replaced and updated at once, the member ends past a bound that it was within."""
    events = list(run_world(make_world(REPLACING_SEED, Mode.ROLLART)).events)
    assert audit(events) == []
    replaced = [index for index, event in enumerate(events) if isinstance(event, j.MemberReplaced)]
    assert any(audit(events[:index] + events[index + 1 :]) for index in replaced), "removed"
    assert all(audit([*events[: index + 1], *events[index:]]) for index in replaced), "doubled"
    other = replace(events[replaced[0]], group=max(e.group for e in events if isinstance(e, j.GroupOpened)))
    assert audit([*events[: replaced[0]], other]), "not its group"


def test_a_prompt_that_was_lost_is_not_passed_over(lossy: Journal) -> None:
    """Another prompt of its task is opened first."""
    tickets = {event.group: (event.task, event.ticket) for event in lossy if isinstance(event, j.GroupOpened)}
    stale = next(
        index
        for index, event in enumerate(lossy)
        if isinstance(event, j.GroupEnded) and event.outcome is GroupOutcome.STALE
    )
    task, ticket = tickets[lossy[stale].group]  # type: ignore[union-attr]
    again = next(
        index
        for index, event in enumerate(lossy)
        if index > stale and isinstance(event, j.GroupOpened) and event.ticket == ticket
    )
    opened = lossy[again]
    assert isinstance(opened, j.GroupOpened)
    other = replace(opened, ticket=max(ticket for _, ticket in tickets.values()) + 1, alpha=None)
    taken = next(event for event in lossy if isinstance(event, j.PromptTaken) and event.prompt.task == task)
    next_ticket = 1 + max(event.ticket for event in lossy[:again] if isinstance(event, j.PromptTaken))
    found = audit(
        [*lossy[:again], replace(taken, at=opened.at, ticket=next_ticket), replace(other, ticket=next_ticket)]
    )
    assert any("with losses waits: passed over" in violation.what for violation in found)


def test_a_violation_says_where_and_what(clean: Journal) -> None:
    index = index_of(clean, j.TrajectoryEnded)
    first = audit([*clean[: index + 1], *clean[index:]])[0]
    assert (first.rule, first.event) == (1, index + 1)
    assert "ended twice" in str(first)


def test_a_new_controller_is_not_held_to_what_the_old_one_redistributed(clean: Journal) -> None:
    """Of a batch that was never claimed (found by the fuzzer)."""
    first = clean[0]
    assert isinstance(first, j.RunStarted)
    giving, taking = first.groups_per_batch
    changed = j.ShareRedistributed(first.at, 0, {giving: 1}, {taking: 1}, "late")
    resumed = j.RunResumed(first.at, first.mode, first.alpha, first.step_bound_s, first.rules)
    assert audit([first, changed, resumed, *clean[1:]]) == []
    assert {violation.rule for violation in audit([first, changed, *clean[1:]])} >= {3}


def test_a_step_that_takes_longer_than_the_run_stated(clean: Journal) -> None:
    first = clean[0]
    assert isinstance(first, j.RunStarted)
    assert {violation.rule for violation in audit([replace(first, step_bound_s=0.01), *clean[1:]])} == {8}


@pytest.mark.parametrize(
    ("stop", "rules"),
    [
        (StopReason.STALLED, [6]),
        (StopReason.INVARIANT_BROKEN, [1]),
        (StopReason.NO_ENGINE, []),
        (StopReason.INTERRUPTED, []),
    ],
)
def test_a_run_that_a_bug_stopped_is_found_by_its_stop_reason(
    clean: Journal, stop: StopReason, rules: list[int]
) -> None:
    """Whatever the words are."""
    ended = replace(clean[-1], stop=stop, reason="StalledRun, InvariantBroken: words")
    found = audit([*clean[:-1], ended])
    assert [violation.rule for violation in found] == rules


HELPERS = {"move", "forget_versions", "alpha_of"}
"""Functions of rule modules that other checks call."""


def test_every_check_is_listed() -> None:
    """A check that `CHECKS` leaves out would never run, and nothing would tell."""
    listed = {check for checks in (*auditor.CHECKS.values(), auditor.CHECKS_AT_THE_END) for check in checks}
    names = {module.name for module in pkgutil.iter_modules(package.__path__)} - {"auditor", "state"}
    for name in names:
        module = importlib.import_module(f"{package.__name__}.{name}")
        assert (module.__doc__ or "").startswith("Rule "), f"{name} does not say which rule it checks"
        for function_name, function in inspect.getmembers(module, inspect.isfunction):
            own = function.__module__ == module.__name__ and not function_name.startswith("_")
            assert not own or function in listed or function_name in HELPERS, f"{name}.{function_name} is never run"
