"""Rule 1, prompts: no prompt is skipped, passed over or lost.

Every prompt that is taken from its source has a ticket, numbered without gaps:

    taken ─► waiting ─► open (a group works on it) ─► trained ─► settled by the next checkpoint
                ▲            │        │                  │
                ╰─ requeued ─╯        ╰─► settled:       ╰─► waiting again after a roll-back
                                          filtered, failed too often

Checked: a new prompt is taken only while none of its task waits; a group is opened for a waiting ticket; the outcome of
the group and `requeued` agree; at the end of the run no ticket is open.
"""

from rollart.observe.audit.state import AuditState
from rollart.types import journal as j
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
    if found != SETTLED:
        move(state, event.ticket, OPEN)


def group_ended(state: AuditState, event: j.GroupEnded) -> None:
    group = state.groups[event.group]
    if group.opened.purpose is Purpose.EVAL:
        if event.requeued or event.outcome is GroupOutcome.TRAINED:
            state.wrong(1, f"evaluation group {group.id} ended as {event.outcome.value}, requeued {event.requeued}")
        return
    ticket = group.opened.ticket
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
    if to == SETTLED:
        state.tickets.pop(ticket, None)
        del state.tasks[ticket]
    else:
        state.tickets[ticket] = to
