"""Rule 3, shares: a batch holds whole groups, of every task the configured number unless a redistribution was recorded.

Checked at every claim: the number of groups by task against `RunStarted.groups_per_batch` as changed by the
`ShareRedistributed` of that step, and the number of trajectories against the group size. A redistribution gives away
as many groups as others take over. It is void after a roll-back or a resume.
"""

from collections import Counter

from rollart.observe.audit.state import AuditState
from rollart.types import journal as j


def share_redistributed(state: AuditState, event: j.ShareRedistributed) -> None:
    if sum(event.missing.values()) != sum(event.filled_by.values()):
        state.wrong(3, f"step {event.step}: {event.missing} was given up, {event.filled_by} was taken over")
    state.redistributed.setdefault(event.step, []).append(event)


def batch_claimed(state: AuditState, event: j.BatchClaimed) -> None:
    run = state.run
    if run is None:
        return
    wanted = Counter(run.groups_per_batch)
    for change in state.redistributed.pop(event.step, []):
        wanted.subtract(change.missing)
        wanted.update(change.filled_by)
    got = Counter(group.opened.task for group in state.groups_taken(event.claim))
    if {task: count for task, count in wanted.items() if count} != dict(got):
        state.wrong(3, f"claim {event.claim} holds {dict(got)} groups instead of {dict(wanted)}")
    if len(event.trajectories) != len(event.groups) * run.group_size:
        state.wrong(3, f"claim {event.claim} holds {len(event.trajectories)} trajectories: groups are not whole")


def forget_redistributions(state: AuditState, event: j.RunResumed | j.RolledBack) -> None:  # noqa: ARG001
    """They were for a batch that was never claimed."""
    state.redistributed.clear()
