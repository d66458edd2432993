"""Rule 1, lineage: steps, checkpoints and roll-backs form one lineage, and snapshots agree with it.

Checked: a claim is for the step that the lineage is at; a trainer starts from a checkpoint between the last one saved
and the lineage; a roll-back goes no further back than the last checkpoint and names exactly the groups trained since;
the run ends with the number of steps that the lineage has. A resume trusts the last `Snapshot`, so every snapshot is
compared with what the events before it add up to.
"""

from rollart.observe.audit import prompts
from rollart.observe.audit.state import AuditState
from rollart.types import journal as j
from rollart.types.trajectory import GroupOutcome, Purpose


def epoch_started(state: AuditState, event: j.EpochStarted) -> None:
    # A checkpoint whose `CheckpointSaved` was lost is legal; one older than the last saved, or of the future, is not.
    if not state.saved <= event.step <= state.step:
        state.wrong(
            1,
            f"a trainer started from step {event.step}; the last checkpoint is of {state.saved}, "
            f"the lineage is at {state.step}",
        )


def batch_claimed(state: AuditState, event: j.BatchClaimed) -> None:
    if event.step != state.step:
        state.wrong(1, f"claim {event.claim} is for step {event.step}; the lineage is at {state.step}")


def step_trained(state: AuditState, event: j.StepTrained) -> None:
    state.step = event.version.step


def group_ended(state: AuditState, event: j.GroupEnded) -> None:
    group = state.groups[event.group]
    if event.outcome is GroupOutcome.TRAINED and group.opened.purpose is Purpose.TRAIN:
        state.trained[group.id] = (group.trained or 0, group.opened.ticket)


def checkpoint_saved(state: AuditState, event: j.CheckpointSaved) -> None:
    if event.version.step > state.step:
        state.wrong(1, f"a checkpoint of {event.version} while the lineage is at step {state.step}")
    state.saved = max(state.saved, event.version.step)
    for id, (step, ticket) in list(state.trained.items()):
        if step <= event.version.step:
            del state.trained[id]
            prompts.move(state, ticket, prompts.SETTLED)


def rolled_back(state: AuditState, event: j.RolledBack) -> None:
    if event.step < state.saved:
        state.wrong(1, f"a roll-back to step {event.step}, although the checkpoint of {state.saved} was saved")
    void = {id: entry for id, entry in state.trained.items() if entry[0] > event.step}
    if set(void) != set(event.groups):
        state.wrong(1, f"the roll-back to step {event.step} names {len(event.groups)} groups; {len(void)} are void")
    for id, (_, ticket) in void.items():
        prompts.move(state, ticket, prompts.WAITING)
        del state.trained[id]
    state.step = event.step


def snapshot(state: AuditState, event: j.Snapshot) -> None:
    stated = event.state
    parts: dict[str, tuple[object, object]] = {
        "the epoch": (stated.epoch, state.epoch),
        "the step": (stated.step, state.step),
        "the next group, trajectory and ticket": (
            (stated.next_group, stated.next_trajectory, stated.next_ticket),
            (state.next_group, state.next_trajectory, state.next_ticket),
        ),
        "the prompts that wait": (
            {ticket.number for ticket in stated.waiting},
            {ticket for ticket, found in state.tickets.items() if found == prompts.WAITING},
        ),
        "the open groups": ({group.group for group in stated.groups}, set(state.groups)),
        "the open trajectories": (
            {t.trajectory: (t.turns, t.sampled, t.first, t.last) for t in stated.trajectories},
            {t.id: (t.turns, t.sampled, t.first, t.last) for t in state.running()},
        ),
        "the open claims": ({claim.claim for claim in stated.claims}, set(state.claims)),
        "what was trained since the checkpoint": (
            {group.group: group.step for group in stated.trained},
            {group: step for group, (step, _) in state.trained.items()},
        ),
    }
    for what, (said, found) in parts.items():
        if said != found:
            state.wrong(1, f"the snapshot and the events before it disagree about {what}")


def steps_of_the_run(state: AuditState, ended: j.RunEnded) -> None:
    if ended.steps != state.step:
        state.wrong(1, f"the run says {ended.steps} steps; the lineage has {state.step}")
