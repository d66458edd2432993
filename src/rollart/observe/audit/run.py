"""Rule 1, the run and its workers: the run starts once, and so does every worker id.

Checked: `RunStarted` comes once; the incarnation in a worker's id (`engine/fast/0.3`) only grows; the run did not stop
because the control plane found an invariant broken. A resumed run has a new controller, which starts workers anew.
"""

import msgspec

from rollart.observe.audit.state import AuditState
from rollart.types import journal as j
from rollart.types.failures import StopReason
from rollart.types.ids import WorkerId


def run_started(state: AuditState, event: j.RunStarted) -> None:
    if state.run is not None:
        state.wrong(1, "the run started twice")
    state.run = event


def run_resumed(state: AuditState, event: j.RunResumed) -> None:
    """Adopt the rules of the new controller, which may be a newer version of rollart."""
    if state.run is not None:
        state.run = msgspec.structs.replace(state.run, rules=event.rules, rewards=event.rewards)
    state.ended = None
    state.roles.clear()
    state.incarnations.clear()


def run_ended(state: AuditState, event: j.RunEnded) -> None:
    state.ended = event


def stopped_by_a_bug(state: AuditState, event: j.RunEnded) -> None:
    if event.stop is StopReason.INVARIANT_BROKEN:
        state.wrong(1, event.reason)


def worker_spawned(state: AuditState, event: j.WorkerSpawned) -> None:
    place, _, number = event.worker.rpartition(".")
    incarnation = int(number) if number.isdecimal() else 0
    before = state.incarnations.get(place, -1)
    if incarnation <= before:
        state.wrong(1, f"worker {event.worker} was started twice under one id")
    state.roles.pop(WorkerId(f"{place}.{before}"), None)
    state.incarnations[place] = max(incarnation, before)
    state.roles[event.worker] = (event.role, event.pool)
