"""Rule 1, prompts: no prompt is skipped, passed over or lost.

Every prompt that is taken from its source has a ticket, numbered without gaps:

    taken ─► waiting ─► open (a group works on it) ─► trained ─► settled by the next checkpoint
                ▲            │        │                  │
                ╰─ requeued ─╯        ╰─► settled:       ╰─► waiting again after a roll-back
                                          filtered, failed too often

Checked: a new prompt is taken only while none of its task waits; a group is opened for a waiting ticket; the outcome of
the group and `requeued` agree; at the end of the run no ticket is open.

No prompt starves. A loss is an update at which a group of the prompt lost members to the staleness bound, or ended as
stale. Checked: a prompt with losses goes before others of its task; after `stale_retries` losses its group has the
bound `late_alpha`, and never before; under that bound there are no more losses, so a prompt has at most that many; one
that is given up has a cause.
"""

from rollart.config.modes import MODES, Mode
from rollart.observe.audit.state import AuditState, GroupState
from rollart.types import journal as j
from rollart.types.ids import GroupId
from rollart.types.trajectory import GroupOutcome, Purpose

WAITING, OPEN, TRAINED, SETTLED = "waiting", "open", "trained", "settled"


def prompt_taken(state: AuditState, event: j.PromptTaken) -> None:
    if event.ticket != state.next_ticket:
        state.wrong(1, f"ticket {event.ticket} was taken, {state.next_ticket} was next: a prompt was skipped")
    state.next_ticket = max(state.next_ticket, event.ticket + 1)
    task = event.prompt.task
    if waiting := state.waiting.get(task):
        state.wrong(1, f"ticket {event.ticket} was taken while {waiting} of {task} wait: passed over")
    state.tasks[event.ticket] = task
    move(state, event.ticket, WAITING)


def group_opened(state: AuditState, event: j.GroupOpened) -> None:
    if event.purpose is not Purpose.TRAIN:
        return
    found = state.tickets.get(event.ticket, SETTLED)
    if found != WAITING:
        state.wrong(1, f"group {event.group} was opened for ticket {event.ticket}, which is {found}")
    if found == SETTLED:
        return
    lost = state.losses.get(event.ticket, 0)
    if not lost and state.lost_waiting.get(event.task):
        state.wrong(1, f"group {event.group} was opened while a prompt of {event.task} with losses waits: passed over")
    move(state, event.ticket, OPEN)
    state.groups[event.group].alpha = event.alpha
    _own_bound(state, event.task, event.group, event.alpha, lost)


def members_lost(state: AuditState, event: j.MembersLost) -> None:
    group = state.groups[event.group]
    _count_loss(state, group)
    if event.alpha is not None:
        group.alpha = event.alpha
    _own_bound(state, group.opened.task, group.id, group.alpha, state.losses.get(group.opened.ticket, 0))


def _count_loss(state: AuditState, group: GroupState) -> None:
    if group.alpha is not None:
        state.wrong(1, f"group {group.id} lost members under a bound of its own: its prompt starves")
    ticket = group.opened.ticket
    state.losses[ticket] = state.losses.get(ticket, 0) + 1


def _own_bound(state: AuditState, task: str, group: GroupId, alpha: int | None, losses: int) -> None:
    """Check that a group gets its own bound after the configured number of losses, with the configured value."""
    rules = None if state.run is None else state.run.rules
    if rules is None or state.run is None or not MODES[Mode(state.run.mode)].check_every_turn:
        return
    due = rules.late_alpha[task] if losses >= rules.stale_retries[task] else None
    if alpha != due:
        state.wrong(1, f"group {group} has the bound {alpha} of its own after {losses} losses; it should be {due}")


def group_ended(state: AuditState, event: j.GroupEnded) -> None:
    group = state.groups[event.group]
    if group.opened.purpose is Purpose.EVAL:
        if event.requeued or event.outcome is GroupOutcome.TRAINED:
            state.wrong(1, f"evaluation group {group.id} ended as {event.outcome.value}, requeued {event.requeued}")
        return
    ticket = group.opened.ticket
    if event.outcome is GroupOutcome.STALE:
        _count_loss(state, group)
    if event.outcome is GroupOutcome.FAILED and not event.cause:
        state.wrong(1, f"group {group.id} failed without a cause")
    if event.requeued and event.outcome in (GroupOutcome.TRAINED, GroupOutcome.FILTERED):
        state.wrong(1, f"group {group.id} ended as {event.outcome.value} and its prompt was queued again")
    if event.outcome is GroupOutcome.TRAINED:
        move(state, ticket, TRAINED)
    elif event.requeued:
        move(state, ticket, WAITING)
    elif event.outcome in (GroupOutcome.FILTERED, GroupOutcome.FAILED):
        move(state, ticket, SETTLED)
    else:
        state.wrong(1, f"group {group.id} ended as {event.outcome.value} and its prompt was not queued again")


def none_open(state: AuditState, ended: j.RunEnded) -> None:  # noqa: ARG001
    for ticket, found in state.tickets.items():
        if found == OPEN:
            state.wrong(1, f"ticket {ticket} is neither trained, nor spent, nor waiting")


def move(state: AuditState, ticket: int, to: str) -> None:
    """Change the state of a ticket; settled ones are forgotten."""
    task = state.tasks.get(ticket)
    if task is None:
        return  # of a ticket that was never taken, which has been reported
    change = (to == WAITING) - (state.tickets.get(ticket) == WAITING)
    state.waiting[task] = state.waiting.get(task, 0) + change
    if state.losses.get(ticket):
        state.lost_waiting[task] = state.lost_waiting.get(task, 0) + change
    if to == SETTLED:
        state.losses.pop(ticket, None)
        state.tickets.pop(ticket, None)
        del state.tasks[ticket]
    else:
        state.tickets[ticket] = to
