"""Rule 6, waits: every wait has an owner, a deadline and an action.

Checked: when nothing moves, the stall report names something that is waited for; a worker's death is followed by an
action; no run stops as stalled, for then a wait had no deadline.
"""

from rollart.observe.audit.state import AuditState
from rollart.types import journal as j
from rollart.types.failures import StopReason


def run_ended(state: AuditState, event: j.RunEnded) -> None:
    if event.stop is StopReason.STALLED:
        state.wrong(6, event.reason)


def stall_reported(state: AuditState, event: j.StallReported) -> None:
    if not event.waits:
        state.wrong(6, "nothing moved and nothing was waited for")


def worker_died(state: AuditState, event: j.WorkerDied) -> None:
    if not event.action:
        state.wrong(6, f"{event.worker} died and nothing was done about it")
