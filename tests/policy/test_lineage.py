"""The lineage of a run as a specification: where a prompt stands after what the journal says."""

from functools import cache

import msgspec
import pytest

from rollart.policy.lineage import Lineage, replay
from rollart.sim.crashes import run_world
from rollart.sim.faults import Fault
from rollart.sim.fuzz import World, make_world
from rollart.sim.lossy import LinkFaults
from rollart.types import journal as j
from rollart.types.errors import InvariantBroken
from rollart.types.ids import ClaimId, GroupId, PromptId, TrajectoryId, WorkerId
from rollart.types.snapshot import OpenClaim, OpenGroupState, OpenTrajectory, RunState, TrainedGroup
from rollart.types.trajectory import GroupOutcome, Outcome, Prompt, Purpose, Ticket
from rollart.types.versions import Version

TASK = "game"


def prompt(ticket: int) -> Prompt:
    return Prompt(id=PromptId(f"p{ticket}"), task=TASK, seed=ticket)


def taken(ticket: int) -> j.PromptTaken:
    return j.PromptTaken(0.0, ticket, prompt(ticket), {"next": ticket + 1})


def opened(group: int, ticket: int, purpose: Purpose = Purpose.TRAIN) -> j.GroupOpened:
    return j.GroupOpened(0.0, GroupId(group), TASK, PromptId(f"p{ticket}"), purpose, ticket, 0)


def started(trajectory: int, group: int, member: int = 0) -> j.TrajectoryStarted:
    return j.TrajectoryStarted(0.0, TrajectoryId(trajectory), GroupId(group), member, 0, "environment/0")


def turn(trajectory: int, number: int, *runs: tuple[Version, int]) -> j.TurnEnded:
    sampled = sum(count for _, count in runs)
    return j.TurnEnded(0.0, TrajectoryId(trajectory), number, WorkerId("e"), sampled, 0, 0, 0, runs)


def over(trajectory: int, outcome: Outcome = Outcome.COMPLETED) -> j.TrajectoryEnded:
    return j.TrajectoryEnded(0.0, TrajectoryId(trajectory), outcome, 1, 1)


def ended(group: int, outcome: GroupOutcome = GroupOutcome.TRAINED, *, requeued: bool = False) -> j.GroupEnded:
    return j.GroupEnded(0.0, GroupId(group), outcome, requeued)


def claimed(claim: int, step: int, *groups: int) -> j.BatchClaimed:
    version = Version(0, step)
    ids = tuple(GroupId(group) for group in groups)
    return j.BatchClaimed(0.0, ClaimId(claim), step, version, version, ids, (), (), ())


def stepped(claim: int, step: int) -> j.StepTrained:
    return j.StepTrained(0.0, ClaimId(claim), Version(0, step), 1.0, {})


def saved(step: int) -> j.CheckpointSaved:
    return j.CheckpointSaved(0.0, Version(0, step))


def rolled_back(step: int) -> j.RolledBack:
    return j.RolledBack(0.0, 1, step, ())


def fold(*events: j.JournalEvent) -> RunState:
    lineage = Lineage()
    for event in events:
        lineage.apply(event)
    return lineage.state()


def trained_step(step: int, *, ticket: int) -> list[j.JournalEvent]:
    """One step, from `step - 1` to `step`, of the one prompt of this ticket; its group and claim have its number."""
    return [
        taken(ticket),
        opened(ticket, ticket),
        claimed(ticket, step - 1, ticket),
        stepped(ticket, step),
        ended(ticket),
    ]


def test_a_new_run_knows_nothing() -> None:
    assert Lineage().state() == RunState() == replay([])
    assert RunState().epoch == -1


def test_a_prompt_goes_from_taken_to_settled() -> None:
    lineage = Lineage()

    lineage.apply(taken(0))
    assert lineage.state() == RunState(next_ticket=1, cursors={TASK: {"next": 1}}, waiting=(Ticket(0, prompt(0)),)), (
        "a prompt that was taken waits, and its source is past it"
    )

    lineage.apply(opened(0, 0))
    state = lineage.state()
    assert state.waiting == ()
    assert state.groups == (OpenGroupState(GroupId(0), Purpose.TRAIN, Ticket(0, prompt(0)), 0),)
    assert state.next_group == 1

    lineage.apply(started(0, 0, member=0))
    lineage.apply(started(1, 0, member=1))
    state = lineage.state()
    assert state.trajectories == (OpenTrajectory(TrajectoryId(0)), OpenTrajectory(TrajectoryId(1)))
    assert (state.next_trajectory, state.groups[0].next_member) == (2, 2)

    lineage.apply(over(0))
    lineage.apply(over(1))
    assert lineage.state().trajectories == ()

    lineage.apply(claimed(0, 0, 0))
    state = lineage.state()
    assert state.claims == (OpenClaim(ClaimId(0), 0, (GroupId(0),)),)
    assert (state.next_claim, state.step) == (1, 0), "a claim is not a step yet"

    lineage.apply(stepped(0, 1))
    lineage.apply(ended(0))
    state = lineage.state()
    assert (state.claims, state.groups, state.step) == ((), (), 1)
    assert state.trained == (TrainedGroup(GroupId(0), 1, Ticket(0, prompt(0), attempt=1, next_member=2)),)

    lineage.apply(saved(1))
    assert lineage.state() == RunState(
        step=1, next_group=1, next_trajectory=2, next_ticket=1, next_claim=1, cursors={TASK: {"next": 1}}
    ), "nothing is left of it but the counters"


def test_a_trajectory_remembers_its_first_and_last_version() -> None:
    before = (taken(0), opened(0, 0), started(0, 0))
    one = fold(*before, turn(0, 1, (Version(0, 1), 3)))
    assert one.trajectories == (OpenTrajectory(TrajectoryId(0), 1, 3, Version(0, 1), Version(0, 1)),)
    two = fold(*before, turn(0, 1, (Version(0, 1), 3)), turn(0, 2, (Version(0, 1), 2), (Version(0, 2), 4)))
    assert two.trajectories == (OpenTrajectory(TrajectoryId(0), 2, 9, Version(0, 1), Version(0, 2)),)
    empty = fold(*before, turn(0, 1), turn(0, 2, (Version(0, 2), 1)), turn(0, 3))
    assert empty.trajectories == (OpenTrajectory(TrajectoryId(0), 3, 1, Version(0, 2), Version(0, 2)),)


def test_the_very_first_version_is_a_version() -> None:
    state = fold(taken(0), opened(0, 0), started(0, 0), turn(0, 1, (Version(0, 0), 1)), turn(0, 2, (Version(0, 1), 1)))
    assert state.trajectories[0].first == Version(0, 0)


@pytest.mark.parametrize(
    ("outcome", "failures"),
    [(GroupOutcome.FAILED, 1), (GroupOutcome.STALE, 0), (GroupOutcome.REDUNDANT, 0), (GroupOutcome.CANCELLED, 0)],
)
def test_a_prompt_that_is_queued_again_keeps_its_history(outcome: GroupOutcome, failures: int) -> None:
    events = [taken(0), opened(0, 0), started(0, 0, member=0), started(1, 0, member=1), over(0), over(1)]
    state = fold(*events, ended(0, outcome, requeued=True))
    losses = int(outcome is GroupOutcome.STALE)
    ticket = Ticket(0, prompt(0), attempt=1, failures=failures, next_member=2, losses=losses)
    assert state.waiting == (ticket,)

    lineage = Lineage(state)
    lineage.apply(opened(1, 0))
    assert lineage.state().groups == (OpenGroupState(GroupId(1), Purpose.TRAIN, ticket, 2),), "member numbers go on"
    lineage.apply(started(2, 1, member=2))
    lineage.apply(ended(1, GroupOutcome.FAILED, requeued=True))
    again = Ticket(0, prompt(0), attempt=2, failures=failures + 1, next_member=3, losses=losses)
    assert lineage.state().waiting == (again,)


def test_losses_of_a_prompt_are_counted_with_its_groups_and_survive_a_snapshot() -> None:
    lost = j.MembersLost(0.0, GroupId(0), (TrajectoryId(0),))
    state = fold(taken(0), opened(0, 0), started(0, 0, member=0), lost)
    assert state.groups[0].lost == 1
    lineage = Lineage(state)
    lineage.apply(lost)
    lineage.apply(ended(0, GroupOutcome.STALE, requeued=True))
    assert [ticket.losses for ticket in lineage.state().waiting] == [3]


def test_a_prompt_that_is_queued_again_waits_behind_the_others() -> None:
    state = fold(taken(0), opened(0, 0), taken(1), taken(2), ended(0, GroupOutcome.STALE, requeued=True))
    assert [ticket.number for ticket in state.waiting] == [1, 2, 0]


@pytest.mark.parametrize("outcome", [GroupOutcome.FILTERED, GroupOutcome.FAILED])
def test_a_prompt_that_is_not_queued_again_is_spent(outcome: GroupOutcome) -> None:
    state = fold(taken(0), opened(0, 0), ended(0, outcome))
    assert (state.waiting, state.groups, state.trained) == ((), (), ())


def test_a_roll_back_puts_what_it_makes_void_first_and_in_order() -> None:
    state = fold(
        *trained_step(1, ticket=0),
        saved(1),
        *trained_step(2, ticket=1),
        *trained_step(3, ticket=2),
        taken(3),
        taken(4),
        rolled_back(1),
    )
    assert [ticket.number for ticket in state.waiting] == [1, 2, 3, 4]
    assert [ticket.attempt for ticket in state.waiting] == [1, 1, 0, 0]
    assert (state.step, state.trained) == (1, ())


def test_a_roll_back_keeps_what_the_checkpoint_holds() -> None:
    """The trainer saved step 2, and died before anybody heard of it: step 2 stands, step 3 does not."""
    lineage = Lineage()
    for step in (1, 2, 3):
        for event in trained_step(step, ticket=step):
            lineage.apply(event)
    assert [entry.group for entry in lineage.trained_after(2)] == [3]
    lineage.apply(rolled_back(2))
    assert [entry.step for entry in lineage.state().trained] == [1, 2]
    assert [ticket.number for ticket in lineage.state().waiting] == [3]
    lineage.apply(rolled_back(0))
    assert [ticket.number for ticket in lineage.state().waiting] == [1, 2, 3]
    assert lineage.state().trained == ()


def test_a_checkpoint_settles_its_own_steps_and_no_later_ones() -> None:
    """Where training overlaps the save, a step may be trained before the checkpoint of the one before is there."""
    state = fold(*trained_step(1, ticket=0), *trained_step(2, ticket=1), saved(1))
    assert [entry.step for entry in state.trained] == [2]


def test_a_failed_checkpoint_settles_nothing() -> None:
    events = trained_step(1, ticket=0)
    assert fold(*events, j.CheckpointFailed(0.0, Version(0, 1), "the disk is full")) == fold(*events)


def test_evaluation_groups_come_and_go() -> None:
    evaluation = opened(0, -1, Purpose.EVAL)
    assert replay([evaluation]).groups == (OpenGroupState(GroupId(0), Purpose.EVAL, None, 0),)
    state = fold(evaluation, started(0, 0))
    assert state.groups == (OpenGroupState(GroupId(0), Purpose.EVAL, None, 1),)
    for outcome in (GroupOutcome.EVALUATED, GroupOutcome.CANCELLED):
        after = fold(evaluation, started(0, 0), over(0), ended(0, outcome))
        assert after == RunState(next_group=1, next_trajectory=1), "an evaluation leaves no prompt behind"


def test_a_claim_that_is_returned_was_never_trained() -> None:
    before = (taken(0), opened(0, 0))
    state = fold(*before, claimed(0, 0, 0), j.ClaimReturned(0.0, ClaimId(0), "the trainer was lost"))
    assert msgspec.structs.replace(state, next_claim=0) == fold(*before), "its number is not used again"
    assert state.next_claim == 1
    with pytest.raises(InvariantBroken, match="trained without a step"):
        fold(*before, claimed(0, 0, 0), j.ClaimReturned(0.0, ClaimId(0), "lost"), ended(0))


def test_a_group_whose_end_is_not_written_yet_knows_its_step() -> None:
    """The controller may die between the two events: the next one must not queue the prompt again."""
    cut = fold(taken(0), opened(0, 0), started(0, 0), over(0), claimed(0, 0, 0), stepped(0, 1))
    assert (cut.step, cut.claims) == (1, ())
    assert cut.groups[0].trained_step == 1
    lineage = Lineage(cut)
    lineage.apply(ended(0))
    assert lineage.state().trained == (TrainedGroup(GroupId(0), 1, Ticket(0, prompt(0), attempt=1, next_member=1)),)


def test_a_group_is_opened_for_a_prompt_that_waits() -> None:
    for events in ([opened(0, 0)], [taken(0), opened(0, 0), opened(1, 0)], [taken(0), opened(0, 1)]):
        with pytest.raises(InvariantBroken, match="does not wait"):
            fold(*events)


def test_a_group_is_trained_in_a_step() -> None:
    with pytest.raises(InvariantBroken, match="without a step"):
        fold(taken(0), opened(0, 0), ended(0))


@pytest.mark.parametrize("epoch", [-1, 0, 1])
def test_epochs_only_grow(epoch: int) -> None:
    lineage = Lineage(RunState(epoch=1))
    with pytest.raises(InvariantBroken, match="epochs only grow"):
        lineage.apply(j.EpochStarted(0.0, epoch, 0))
    lineage.apply(j.EpochStarted(0.0, 2, 0))
    assert lineage.state().epoch == 2


def test_a_state_is_a_value() -> None:
    """What was given out does not change with what comes after it."""
    lineage = Lineage()
    lineage.apply(taken(0))
    before = lineage.state()
    lineage.apply(taken(1))
    lineage.apply(opened(0, 0))
    assert before == fold(taken(0))
    later = Lineage(before)
    later.apply(opened(0, 0))
    assert before == fold(taken(0))


def test_replay_begins_at_the_last_snapshot() -> None:
    first = RunState(epoch=3, step=9, next_ticket=5)
    events = [taken(0), j.Snapshot(0.0, RunState(step=1)), opened(7, 77, Purpose.EVAL), j.Snapshot(0.0, first)]
    assert replay(events) == first
    assert [ticket.number for ticket in replay([*events, taken(5)]).waiting] == [5]


# --- journals of simulated runs -------------------------------------------------------------------------------------


SEEDS = (4, 10, 15)
BAD_LINK = LinkFaults(seed=1, loss=0.1, double=0.1, delay_s=0.05)
LOST_UNDER_A_CLAIM = Fault(15, "kill", "trainer/", on="Trained", skip=3, incarnations=10)
LOST_IN_A_SAVE = Fault(16, "kill", "trainer/", on="Save", skip=1, incarnations=10)
AN_ENGINE_DIES = Fault(2, "kill", "engine/", on="TurnDone", skip=20)


@cache
def journal(seed: int) -> tuple[j.JournalEvent, ...]:
    """A run whose trainer is lost twice, and whose controller dies in the middle of it and once more soon after."""
    drawn = make_world(seed)
    tables = drawn.tables | {"steps": max(8, drawn.tables["steps"]), "checkpoint_every": 2}
    faults = (LOST_UNDER_A_CLAIM, LOST_IN_A_SAVE, AN_ENGINE_DIES)
    link = BAD_LINK if seed == SEEDS[-1] else None
    whole = run_world(World(seed, tables, faults, link)).events
    half_s = next(event.at for event in whole if isinstance(event, j.StepTrained) and event.version.step == 4)
    done = run_world(World(seed, tables, faults, link, (half_s, half_s / 2)))
    assert done.violations == []
    assert (done.injected[23], done.injected[15], done.injected[16]) == (2, 1, 1)
    return tuple(done.events)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_journals_have_what_these_tests_are_about(seed: int) -> None:
    kinds = {type(event) for event in journal(seed)}
    assert {j.RunResumed, j.RolledBack, j.Snapshot, j.ClaimReturned, j.CheckpointSaved, j.WorkerDied} <= kinds


@pytest.mark.parametrize("seed", SEEDS)
def test_a_resume_knows_what_the_controller_knew(seed: int) -> None:
    """At every event: the fold of everything, and the fold from the last snapshot on, are the same."""
    whole, resumed = Lineage(), Lineage()
    snapshots = 0
    for number, event in enumerate(journal(seed)):
        if isinstance(event, j.Snapshot):
            snapshots += 1
            assert event.state == replay(journal(seed)[:number]), f"snapshot {snapshots}, event {number}"
            resumed = Lineage(event.state)
        else:
            whole.apply(event)
            resumed.apply(event)
        assert resumed.state() == whole.state(), f"after event {number}, {event}"
    assert snapshots >= 2
    assert replay(journal(seed)) == whole.state()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_snapshot_survives_being_written(seed: int) -> None:
    for event in journal(seed):
        if isinstance(event, j.Snapshot):
            assert msgspec.msgpack.decode(msgspec.msgpack.encode(event), type=j.JournalEvent) == event


@pytest.mark.parametrize("seed", SEEDS)
def test_every_prompt_is_in_one_place(seed: int) -> None:
    """Waiting, in flight, trained since the checkpoint: never in two of them; and a settled one never comes back."""
    lineage = Lineage()
    settled: set[int] = set()
    for event in journal(seed):
        before = {entry.ticket.number for entry in lineage.state().trained}
        lineage.apply(event)
        state = lineage.state()
        trained = {entry.ticket.number for entry in state.trained}
        if isinstance(event, j.CheckpointSaved):
            settled |= before - trained
        places = [ticket.number for ticket in state.waiting]
        places += [group.ticket.number for group in state.groups if group.ticket is not None]
        places += [entry.ticket.number for entry in state.trained]
        assert len(places) == len(set(places)), f"after {event}"
        assert settled.isdisjoint(places), f"after {event}"


@pytest.mark.parametrize("seed", SEEDS)
def test_the_state_does_not_grow_with_the_run(seed: int) -> None:
    """Nothing is left in flight when a run has ended, and its last checkpoint settles all of its steps."""
    state = replay(journal(seed))
    assert (state.groups, state.trajectories, state.claims, state.trained) == ((), (), (), ())
