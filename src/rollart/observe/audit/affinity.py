"""Rule 9, affinity: tasks find their hardware class as the run says, and a declared class wins.

Checked: only automatic tasks are assigned, to classes that they can use; every score follows from the figures of its
decision, and no other class would have been better for a task that moved; a gain was large enough and lasted, and no
task moves more often than allowed; no task stays on a class without engines while another one has some; placements
follow the assignment or say why not; no more trajectories are spent on measuring than allowed. The arithmetic of
`types.affinity` is done again here, so that a mistake in the policy shows.
"""

import math
from collections.abc import Mapping

from rollart.observe.audit.state import AffinityState, AuditState, TrajectoryState
from rollart.types import journal as j
from rollart.types.affinity import AffinityCause, AffinityFigures, WorkCost
from rollart.types.ids import WorkerId
from rollart.types.messages import Role

BURST = 4
"""Trajectories per class that may be spent on measuring it besides the share `explore`."""
MAX_HOLDS = 32
BETTER = 0.98
"""A class that would lower the score to less than this share of it should have been chosen."""
TICKS = 2.0
"""Ticks within which a class without engines must be noticed."""
EXACT = 1e-9


def run_started(state: AuditState, event: j.RunStarted | j.RunResumed) -> None:
    """A new controller measures again."""
    state.affinity = None if event.affinity is None else AffinityState(event.affinity)


# --- engines --------------------------------------------------------------------------------------------------------


def worker_joined(state: AuditState, event: j.WorkerJoined) -> None:
    affinity, name = state.affinity, _class_of(state, event.worker)
    if affinity is None or name is None:
        return
    _nothing_left_behind(state, event.at)
    engines = affinity.engines.setdefault(name, [])
    if not engines:
        affinity.changed_at[name] = event.at
    engines.append(event.worker)


def worker_gone(state: AuditState, event: j.WorkerDied | j.WorkerLeaves | j.WorkerLeft) -> None:
    affinity, name = state.affinity, _class_of(state, event.worker)
    if affinity is None or name is None or event.worker not in affinity.engines.get(name, ()):
        return
    _nothing_left_behind(state, event.at)
    affinity.engines[name].remove(event.worker)
    if not affinity.engines[name]:
        affinity.changed_at[name] = event.at


def step_trained(state: AuditState, event: j.StepTrained) -> None:
    if state.affinity is not None:
        _nothing_left_behind(state, event.at)
        state.affinity.stepped_at = event.at


def run_ended(state: AuditState, event: j.RunEnded) -> None:
    _nothing_left_behind(state, event.at)


def _class_of(state: AuditState, worker: WorkerId) -> str | None:
    role, pool = state.roles.get(worker, (None, ""))
    return None if state.affinity is None or role is not Role.ENGINE else state.affinity.rules.pools.get(pool)


def _nothing_left_behind(state: AuditState, now: float) -> None:
    """No task is assigned to a class without engines for long, while it could use another one."""
    affinity = state.affinity
    if affinity is None:
        return
    rules = affinity.rules
    for task, hardware in affinity.assigned.items():
        if affinity.engines.get(hardware):
            continue
        others = [affinity.changed_at[name] for name in rules.classes.get(task, ()) if affinity.engines.get(name)]
        waited_s = now - max(affinity.changed_at.get(hardware, now), min(others, default=now))
        if waited_s > rules.confirm_s + TICKS * rules.tick_s:
            state.wrong(9, f"{task} stayed on {hardware} for {waited_s:g} s, which has no engine while others have")


# --- decisions ------------------------------------------------------------------------------------------------------


def affinity_changed(state: AuditState, event: j.AffinityChanged) -> None:
    affinity = state.affinity
    if affinity is None:
        state.wrong(9, "tasks were assigned, but this run has no automatic affinity")
        return
    _nothing_left_behind(state, event.at)
    if event.before != affinity.assigned:
        state.wrong(9, f"the assignment before is given as {event.before}, it was {affinity.assigned}")
    tasks = {**event.before, **event.assigned}
    changed = [task for task in tasks if event.before.get(task) != event.assigned.get(task)]
    if sorted(changed) != sorted(event.why):
        state.wrong(9, f"{', '.join(changed) or 'nothing'} changed, explained are {', '.join(event.why) or 'none'}")
    for task, hardware in event.assigned.items():
        declared = affinity.rules.declared.get(task)
        if declared is not None:
            state.wrong(9, f"{task} was assigned to {hardware}, but it declares {declared}")
        elif hardware not in affinity.rules.classes.get(task, ()):
            state.wrong(9, f"{task} was assigned to {hardware}, which it cannot use")
    _figures_are_right(state, affinity, event, changed)
    if event.cause is AffinityCause.GAIN:
        _gain_is_enough(state, affinity, event, changed)
    elif event.cause is AffinityCause.LOST:
        _class_was_lost(state, affinity, event, changed)
    elif any(task in event.before for task in changed):
        state.wrong(9, "a task was measured that had a class before")
    affinity.assigned = dict(event.assigned)


def _figures_are_right(
    state: AuditState, affinity: AffinityState, event: j.AffinityChanged, changed: list[str]
) -> None:
    figures = event.figures
    live = {name: len(engines) for name, engines in affinity.engines.items() if engines}
    if {size.hardware: size.engines for size in figures.classes} != live:
        state.wrong(9, f"decided for {figures.classes}, engines are {live}")
    score = _score(figures, event.assigned)
    if not math.isclose(score, event.score, rel_tol=EXACT):
        state.wrong(9, f"the score is given as {event.score:g}, by its figures it is {score:g}")
    for cost in figures.costs:
        if cost.task in changed and cost.task in event.assigned:
            other = _score(figures, {**event.assigned, cost.task: cost.hardware})
            if other < BETTER * score:
                state.wrong(9, f"{cost.task} would be better on {cost.hardware}: {other:g} instead of {score:g}")


def _gain_is_enough(state: AuditState, affinity: AffinityState, event: j.AffinityChanged, changed: list[str]) -> None:
    rules, before = affinity.rules, _score(event.figures, event.before)
    if not math.isclose(before, event.score_before, rel_tol=EXACT):
        state.wrong(9, f"the score before is given as {event.score_before:g}, by its figures it is {before:g}")
    if event.score > (1.0 - rules.min_gain) * before * (1.0 + EXACT):
        state.wrong(9, f"{', '.join(changed)} moved for too little: {event.score:g} after {before:g}")
    if event.at - event.since < rules.confirm_s * (1.0 - EXACT):
        state.wrong(9, f"{', '.join(changed)} moved after {event.at - event.since:g} s")
    if affinity.stepped_at < event.since:
        state.wrong(9, f"{', '.join(changed)} moved within a training step")
    for task in changed:
        count, last = affinity.moves.get(task, (0, -math.inf))
        hold_s = rules.hold_s * min(2.0 ** (count - 1), MAX_HOLDS)
        if event.at - last < hold_s * (1.0 - EXACT):
            state.wrong(9, f"{task} moved again after {event.at - last:g} s, it has to stay for {hold_s:g} s")
        affinity.moves[task] = (count + 1, event.at)


def _class_was_lost(state: AuditState, affinity: AffinityState, event: j.AffinityChanged, changed: list[str]) -> None:
    for task in changed:
        hardware = event.before.get(task, "")
        lost_s = event.at - affinity.changed_at.get(hardware, event.at)
        if affinity.engines.get(hardware) or lost_s < affinity.rules.confirm_s * (1.0 - EXACT):
            state.wrong(9, f"{task} left {hardware} as lost, which has had no engine for {lost_s:g} s")


def _score(figures: AffinityFigures, assignment: Mapping[str, str]) -> float:
    """See `types.affinity`."""
    squares = 0.0
    for size in figures.classes:
        here = [cost for cost in figures.costs if assignment.get(cost.task) == cost.hardware == size.hardware]
        here += [cost for cost in figures.pinned if cost.hardware == size.hardware]
        batch = min(max(_sum(here, "in_flight") / size.engines, 1.0), size.slots)
        seconds = _sum(here, "prefill_s") + _sum(here, "decode_s") + _sum(here, "fixed_s") / batch
        squares += seconds**2 / size.engines
    return math.sqrt(squares / sum(size.engines for size in figures.classes))


def _sum(costs: list[WorkCost], field: str) -> float:
    return math.fsum(getattr(cost, field) for cost in costs)


# --- placements -----------------------------------------------------------------------------------------------------


def placed(state: AuditState, event: j.Placed) -> None:
    """Called before the placement is remembered, so that the first one of a trajectory is recognised."""
    affinity, trajectory = state.affinity, state.trajectories.get(event.trajectory)
    if affinity is None or trajectory is None:
        return
    group = state.groups.get(trajectory.group)
    if group is None:
        return
    task = group.opened.task
    rules, measured = affinity.rules, event.reason.endswith(" is measured")
    wanted = rules.declared.get(task, affinity.assigned.get(task, event.hardware))
    if event.hardware != wanted and not event.reason:
        state.wrong(9, f"{task} runs on {event.hardware} instead of {wanted} without a reason")
    if measured and task not in rules.classes:
        state.wrong(9, f"{task} measures {event.hardware}, but its class is not automatic")
    if task in rules.classes:
        _count(state, affinity, task, trajectory, measured=measured)


def _count(
    state: AuditState, affinity: AffinityState, task: str, trajectory: TrajectoryState, *, measured: bool
) -> None:
    rules = affinity.rules
    if trajectory.engine is None:
        affinity.placed[task] = affinity.placed.get(task, 0) + 1
    if measured:
        probes = affinity.probes[task] = affinity.probes.get(task, 0) + 1
        allowed = BURST * len(rules.classes[task]) + rules.explore * affinity.placed.get(task, 0)
        if probes > allowed + EXACT:
            state.wrong(9, f"{probes} trajectories of {task} were spent on measuring, {allowed:g} may be")
