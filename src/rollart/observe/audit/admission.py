"""Rule 2, admission: no more groups are in the making than can still be claimed within the staleness bound.

A training group is in the making from `GroupOpened` until it is claimed or ends, and again after its claim is returned.
At every `GroupOpened` their number is compared with the batches that can still be claimed (the ones until the next
update, plus α where an update interrupts rollout), times the task's share, plus `extra_groups` and what the task took
over from others. Groups with a staleness bound of their own do not count: they may take longer.
"""

from rollart.config.modes import MODES, Mode
from rollart.observe.audit.state import AuditState
from rollart.types import journal as j
from rollart.types.trajectory import Purpose


def group_opened(state: AuditState, event: j.GroupOpened) -> None:
    if event.purpose is not Purpose.TRAIN:
        return
    if event.alpha is not None:
        return
    _count(state, event.task, +1)
    run, served = state.run, state.served
    if run is None or served is None or event.task not in run.groups_per_batch:
        return
    mode = MODES[Mode(run.mode)]
    ahead = served.step + 1 + int(mode.overlap) - (state.step + len(state.claims))
    alpha = run.alpha if run.rules is None else run.rules.alpha.get(event.task, run.alpha)
    batches = ahead + alpha if mode.interrupt else min(ahead, 1)
    changes = [change for step in state.redistributed.values() for change in step]
    taken_over = sum(change.filled_by.get(event.task, 0) for change in changes)
    limit = batches * run.groups_per_batch[event.task] + run.extra_groups + taken_over
    making = state.making[event.task]
    if making > limit:
        state.wrong(2, f"{making} groups of {event.task} are in the making, at most {limit} may be")


def members_lost(state: AuditState, event: j.MembersLost) -> None:
    group = state.groups[event.group]
    if event.alpha is not None and group.alpha is None:
        _count(state, group.opened.task, -1)


def group_ended(state: AuditState, event: j.GroupEnded) -> None:
    group = state.groups[event.group]
    if group.opened.purpose is Purpose.TRAIN and group.trained is None and group.alpha is None:
        _count(state, group.opened.task, -1)


def batch_claimed(state: AuditState, event: j.BatchClaimed) -> None:
    for group in state.groups_taken(event.claim):
        if group.alpha is None:
            _count(state, group.opened.task, -1)


def claim_returned(state: AuditState, event: j.ClaimReturned) -> None:
    for id in state.claims[event.claim].claimed.groups:
        group = state.groups.get(id)
        if group is not None and group.alpha is None:
            _count(state, group.opened.task, +1)


def _count(state: AuditState, task: str, change: int) -> None:
    state.making[task] = state.making.get(task, 0) + change
