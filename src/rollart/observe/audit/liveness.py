"""Rule 8, liveness: no step takes longer than the bound that the run stated when it started.

The clock runs from step to step; the start or loss of a trainer sets it anew, and so does a resume. Compared with
`step_bound_s` of `RunStarted` or `RunResumed` (`policy.liveness`). A run that stops early has to stop in time, too.
"""

from rollart.observe.audit.state import AuditState
from rollart.types import journal as j
from rollart.types.failures import StopReason
from rollart.types.messages import Role


def run_started(state: AuditState, event: j.RunStarted | j.RunResumed) -> None:
    state.step_bound_s = event.step_bound_s
    state.stepping_since = event.at


def run_ended(state: AuditState, event: j.RunEnded) -> None:
    if event.stop is not StopReason.DONE:
        _check(state, "run to stop", event.at)


def epoch_started(state: AuditState, event: j.EpochStarted) -> None:
    _check(state, "start of a trainer", event.at)


def worker_died(state: AuditState, event: j.WorkerDied | j.WorkerLeft) -> None:
    if state.roles.get(event.worker, (None, ""))[0] is Role.TRAINER:
        _check(state, "trainer to be given up", event.at)


def step_trained(state: AuditState, event: j.StepTrained) -> None:
    _check(state, "step", event.at)


def _check(state: AuditState, what: str, at: float) -> None:
    took_s, state.stepping_since = at - state.stepping_since, at
    state.slowest_step_s = max(state.slowest_step_s, took_s)
    if took_s > state.step_bound_s:
        state.wrong(8, f"{took_s:g} s for a {what}, the run's bound is {state.step_bound_s:g} s")
