"""Rule 10, elasticity: pools are resized by the rules of the run, and no work is lost.

Checked: a pool has no fewer engines than its minimum and no more than its maximum, and only those that were decided on
start; every decision follows from its figures, which follow from the nodes and the use of time; a pool changes no more
often than allowed, and does not stay behind its nodes; a removed engine drains, gets no new turns, and is not stopped
before it has finished or its time is over. The arithmetic of `types.elasticity` is done again here.
"""

import math

from rollart.observe.audit.state import AuditState, ElasticPoolState, ElasticState
from rollart.types import journal as j
from rollart.types.elasticity import BUSY, ElasticCause, ElasticFigures, ElasticPool, ElasticRules
from rollart.types.ids import WorkerId
from rollart.types.messages import Role

TRAINER = "trainer"
"""Pool of the trainer in `PoolTime`."""
MAX_TURNS = 5
TICKS = 3.0
"""Ticks within which a change must follow once it is due."""
EXACT = 1e-6
GIVEN_UP = "removed"
"""Beginning of `WorkerDied.action` if the worker's place is given up."""


def run_started(state: AuditState, event: j.RunStarted | j.RunResumed) -> None:
    """A new controller starts with the pools as configured."""
    rules = event.elasticity
    state.elastic = (
        None
        if rules is None
        else ElasticState(rules, {name: ElasticPoolState(pool.max) for name, pool in rules.pools.items()}, event.at)
    )


# --- nodes and workers ----------------------------------------------------------------------------------------------


def room_changed(state: AuditState, event: j.RoomChanged) -> None:
    elastic = state.elastic
    if elastic is None or event.pool not in elastic.pools:
        state.wrong(10, f"there is room for engines of {event.pool}, which is not elastic")
        return
    _nothing_left_behind(state, event.at)
    elastic.pools[event.pool].room = event.engines
    _settle(elastic, event.at)


def worker_spawned(state: AuditState, event: j.WorkerSpawned) -> None:
    elastic, place = state.elastic, event.worker.rpartition(".")[0]
    if elastic is None or event.role is not Role.ENGINE or event.pool not in elastic.pools:
        return
    pool, limits = elastic.pools[event.pool], elastic.rules.pools[event.pool]
    if place not in pool.active:
        if pool.opening and len(pool.active) < limits.start:
            pool.active.append(place)
        else:
            state.wrong(10, f"{event.worker} starts, which was not decided; {event.pool} has {len(pool.active)}")
    pool.workers[event.worker] = None
    _settle(elastic, event.at)


def worker_waits(state: AuditState, event: j.WorkerWaits) -> None:
    elastic = state.elastic
    role, pool = state.roles.get(event.worker, (None, ""))
    if elastic is None or pool in elastic.pools:
        return
    elastic.waiting.setdefault(event.worker, event.at)
    if role is Role.TRAINER:
        since, gone_at = elastic.trainer_gone
        # A tick does not see that one trainer that waited is followed by another one.
        waits_on = event.at - gone_at < elastic.rules.tick_s
        elastic.trainer_waits_since.setdefault(event.worker, since if waits_on else event.at)


def worker_placed(state: AuditState, event: j.WorkerPlaced) -> None:
    if state.elastic is not None:
        _has_node(state.elastic, event.worker, event.at)


def _is_gone(elastic: ElasticState, worker: WorkerId, at: float) -> None:
    """End the worker's wait for a node: it is gone."""
    since = elastic.trainer_waits_since.get(worker)
    if since is not None:
        elastic.trainer_gone = since, at
    _has_node(elastic, worker, at)


def _has_node(elastic: ElasticState, worker: WorkerId, at: float) -> None:
    elastic.trainer_waits_since.pop(worker, None)
    if elastic.waiting.pop(worker, None) is not None:
        elastic.waited_at = at


def worker_leaves(state: AuditState, event: j.WorkerLeaves) -> None:
    elastic, pool = state.elastic, _pool_of(state, event.worker)
    if elastic is None or pool is None:
        return
    if event.worker in elastic.must_leave:
        elastic.must_leave.remove(event.worker)
    pool.workers[event.worker] = event.at


def worker_left(state: AuditState, event: j.WorkerLeft) -> None:
    elastic, pool = state.elastic, _pool_of(state, event.worker)
    if elastic is None:
        return
    _is_gone(elastic, event.worker, event.at)
    if pool is None:
        return
    _all_drain(state, event.at)
    since = pool.workers.pop(event.worker, None)
    if since is None:
        state.wrong(10, f"{event.worker} was stopped without draining")
    elif event.unfinished and event.at - since < elastic.rules.drain_s * (1.0 - EXACT):
        state.wrong(10, f"{event.worker} was stopped {event.at - since:g} s after it began to drain")


def worker_died(state: AuditState, event: j.WorkerDied) -> None:
    elastic, pool = state.elastic, _pool_of(state, event.worker)
    if elastic is None:
        return
    _is_gone(elastic, event.worker, event.at)
    if pool is None:
        return
    _nothing_left_behind(state, event.at)
    pool.workers.pop(event.worker, None)
    if event.worker in elastic.must_leave:
        elastic.must_leave.remove(event.worker)
    place = event.worker.rpartition(".")[0]
    if event.action.startswith(GIVEN_UP) and place in pool.active:
        pool.active.remove(place)
        pool.given_up.append(place)
        _settle(elastic, event.at)


def engines_forgiven(state: AuditState, event: j.EnginesForgiven) -> None:
    elastic = state.elastic
    pool = None if elastic is None else elastic.pools.get(event.pool)
    if elastic is None or pool is None or sorted(event.engines) != sorted(pool.given_up):
        state.wrong(10, f"{', '.join(event.engines)} of {event.pool} get another chance, but were not removed")
        return
    _nothing_left_behind(state, event.at)
    pool.given_up = []
    _settle(elastic, event.at)


def placed(state: AuditState, event: j.Placed) -> None:
    pool = _pool_of(state, event.engine)
    if pool is not None and pool.workers.get(event.engine) is not None:
        state.wrong(10, f"trajectory {event.trajectory} was placed on {event.engine}, which is leaving")


def run_ended(state: AuditState, event: j.RunEnded) -> None:
    _all_drain(state, math.inf)
    _nothing_left_behind(state, event.at)


def _pool_of(state: AuditState, worker: WorkerId) -> ElasticPoolState | None:
    if state.elastic is None:
        return None
    return next((pool for pool in state.elastic.pools.values() if worker in pool.workers), None)


def _all_drain(state: AuditState, now: float) -> None:
    """Removed engines begin to leave at once: one after the other, within a tick."""
    elastic = state.elastic
    if elastic is not None and now - elastic.changed_at > elastic.rules.tick_s:
        for worker in elastic.must_leave:
            state.wrong(10, f"{worker} was removed without draining")
        elastic.must_leave = []


def _target(pool: ElasticPoolState, limits: ElasticPool) -> int:
    """Engines that the pool should have for its nodes."""
    room = pool.wanted if pool.room is None else pool.room
    return min(max(limits.min, min(pool.wanted, room, limits.max)), limits.max - len(pool.given_up))


def _settle(elastic: ElasticState, now: float) -> None:
    """Update since when each pool has had too few, or too many, engines for its nodes."""
    for name, limits in elastic.rules.pools.items():
        pool = elastic.pools[name]
        target, count = _target(pool, limits), len(pool.active)
        sign = 0 if pool.room is None else (target > count) - (target < count)
        if sign != pool.sign:
            pool.ended[pool.sign] = (pool.held_since, now)
            since, until = pool.ended.get(sign, (now, -math.inf))
            pool.sign, pool.sign_since = sign, now
            pool.held_since = since if now - until < elastic.rules.tick_s else now


def _nothing_left_behind(state: AuditState, now: float) -> None:
    """Pools follow their nodes in time; one without engines even while other workers wait for a node."""
    elastic = state.elastic
    if elastic is None:
        return
    limit_s = elastic.rules.confirm_s + TICKS * elastic.rules.tick_s
    for name, pool in elastic.pools.items():
        since = max(pool.sign_since, elastic.changed_at)
        if pool.sign > 0 and pool.active:
            since = now if elastic.waiting else max(since, elastic.waited_at)
        if pool.sign and now - since > limit_s + EXACT:
            target = _target(pool, elastic.rules.pools[name])
            state.wrong(10, f"{name} has had {len(pool.active)} engines for {now - since:g} s instead of {target}")


# --- use of time ----------------------------------------------------------------------------------------------------


def step_trained(state: AuditState, event: j.StepTrained) -> None:
    elastic = state.elastic
    if elastic is None:
        return
    _all_drain(state, event.at)
    _nothing_left_behind(state, event.at)
    _close_step(elastic)
    elastic.step = {}


def pool_time(state: AuditState, event: j.PoolTime) -> None:
    """Those right after a step are of that step."""
    elastic = state.elastic
    if elastic is not None and elastic.step is not None:
        elastic.step.setdefault(event.pool, event)


def _close_step(elastic: ElasticState) -> None:
    step, elastic.step = elastic.step, None
    if not step:
        return
    trainer = step.get(TRAINER)
    for name, pool in elastic.pools.items():
        time = step.get(name)
        if time is not None and pool.fresh:
            seconds = {} if trainer is None else trainer.seconds
            use = (
                math.fsum(seconds.values()),
                seconds.get(j.TimeUse.ROLLOUT, 0.0),
                math.fsum(time.seconds.values()),
                time.seconds.get(j.TimeUse.BUSY, 0.0),
                time.seconds.get(j.TimeUse.TRAINING, 0.0),
                time.seconds.get(j.TimeUse.WEIGHT_SYNC, 0.0),
            )
            pool.steps = [*pool.steps, use][-elastic.rules.confirm_steps :]
        pool.fresh = time is not None


# --- decisions ------------------------------------------------------------------------------------------------------


def engines_changed(state: AuditState, event: j.EnginesChanged) -> None:
    elastic = state.elastic
    if elastic is None or event.pool not in elastic.pools:
        state.wrong(10, f"the engines of {event.pool} changed, which is not elastic")
        return
    _all_drain(state, event.at)
    _nothing_left_behind(state, event.at)
    _close_step(elastic)
    pool, limits = elastic.pools[event.pool], elastic.rules.pools[event.pool]
    _numbers_are_right(state, pool, limits, event)
    if event.cause is ElasticCause.NODES:
        _nodes_changed(state, elastic, event)
    elif event.cause is ElasticCause.TRAINER:
        _trainer_waited(state, elastic, event)
    elif event.cause in (ElasticCause.ROLLOUT, ElasticCause.TRAINING):
        _time_was_lost(state, elastic, event)
    elif event.before >= limits.min:
        state.wrong(10, f"{event.pool} was filled up to its minimum of {limits.min}, it had {event.before}")
    _apply(elastic, pool, event)


def _apply(elastic: ElasticState, pool: ElasticPoolState, event: j.EnginesChanged) -> None:
    pool.opening = False
    if event.after > event.before:
        pool.active += event.changed
    else:
        pool.active = [place for place in pool.active if place not in event.changed]
        elastic.must_leave = [
            worker
            for worker, leaving in pool.workers.items()
            if leaving is None and worker.rpartition(".")[0] in event.changed
        ]
    elastic.changed_at = event.at
    for other in elastic.pools.values():
        other.steps, other.fresh = [], False
    _settle(elastic, event.at)


def _numbers_are_right(state: AuditState, pool: ElasticPoolState, limits: ElasticPool, event: j.EnginesChanged) -> None:
    count, known = len(pool.active), set(pool.active)
    if event.before != count or abs(event.after - event.before) != len(event.changed) or not event.changed:
        state.wrong(10, f"{event.pool} had {count} engines: {event.before} → {event.after}, {len(event.changed)} named")
    if event.after > max(limits.max, event.before) or event.after < min(limits.min, event.before):
        state.wrong(10, f"{event.pool} has {event.after} engines, allowed are {limits.min} to {limits.max}")
    wrong = [place for place in event.changed if (place in known) == (event.after > event.before)]
    if wrong:
        state.wrong(10, f"{event.pool} {event.before} → {event.after} names {', '.join(wrong)}")
    if event.figures.room != pool.room:
        state.wrong(10, f"{event.pool} was decided for room for {event.figures.room}, there is room for {pool.room}")


def _nodes_changed(state: AuditState, elastic: ElasticState, event: j.EnginesChanged) -> None:
    pool, rules = elastic.pools[event.pool], elastic.rules
    sign = 1 if event.after > event.before else -1
    since = max(pool.held_since, elastic.changed_at)
    if sign != pool.sign or event.since < since - EXACT or event.at - event.since < rules.confirm_s - EXACT:
        state.wrong(10, f"{event.pool} {event.before} → {event.after} for its nodes, which has held since {since:g}")
    if event.after != _target(pool, rules.pools[event.pool]):
        state.wrong(10, f"{event.pool} got {event.after} engines for its nodes, room is for {pool.room}")


def _trainer_waited(state: AuditState, elastic: ElasticState, event: j.EnginesChanged) -> None:
    since = max(min(elastic.trainer_waits_since.values(), default=event.at), elastic.changed_at)
    if event.at - since < elastic.rules.confirm_s - EXACT or event.after != event.before - 1:
        state.wrong(10, f"{event.pool} {event.before} → {event.after} for a trainer that waits since {since:g}")


def _time_was_lost(state: AuditState, elastic: ElasticState, event: j.EnginesChanged) -> None:
    pool, rules = elastic.pools[event.pool], elastic.rules
    if len(pool.steps) < rules.confirm_steps:
        state.wrong(10, f"{event.pool} changed after {len(pool.steps)} whole steps")
        return
    growing = event.after > event.before
    if not all(_asks_for(rules, step, growing=growing) for step in pool.steps):
        state.wrong(10, f"{event.pool} {event.before} → {event.after}, which not every step asked for")
    _figures_are_right(state, pool, rules, event)
    if event.at < pool.held_until - EXACT:
        state.wrong(10, f"{event.pool} changed {pool.held_until - event.at:g} s too early")
    direction = 1 if growing else -1
    pool.turns = min(pool.turns + (pool.direction == -direction), MAX_TURNS)
    pool.direction, pool.wanted = direction, event.after
    pool.held_until = event.at + rules.hold_s * 2.0**pool.turns


def _asks_for(rules: ElasticRules, step: tuple[float, ...], *, growing: bool) -> bool:
    trainer, rollout, engines, busy, training, sync = step
    wait = _share(rollout, trainer)
    if growing:
        return wait >= rules.min_wait - EXACT and _share(busy, engines - training - sync) >= BUSY - EXACT
    return _share(training, engines) >= rules.min_wait - EXACT and wait < rules.min_wait / 2 + EXACT


def _figures_are_right(state: AuditState, pool: ElasticPoolState, rules: ElasticRules, event: j.EnginesChanged) -> None:
    trainer, rollout, engines, busy, training, sync = (math.fsum(column) for column in zip(*pool.steps, strict=True))
    given, limits = event.figures, rules.pools[event.pool]
    right = ElasticFigures(
        pool.room,
        _share(rollout, trainer),
        _share(busy, engines - training - sync),
        _share(training, engines),
        event.before * _share(busy, engines),
        given.in_flight,
        len(pool.steps),
    )
    for field in ("wait", "busy", "idle", "busy_engines", "steps"):
        if not math.isclose(getattr(given, field), getattr(right, field), rel_tol=EXACT, abs_tol=EXACT):
            state.wrong(10, f"{field} of {event.pool} is given as {getattr(given, field)}, not {getattr(right, field)}")
    if event.after > event.before:
        most = math.ceil(event.before / max(1.0 - right.wait, 0.5) - EXACT)
        most = min(most, int(given.in_flight), limits.max, most if pool.room is None else pool.room)
        if event.after > most:
            state.wrong(10, f"{event.pool} grew to {event.after} engines, its figures ask for {most}")
    else:
        enough = math.ceil(right.busy_engines / (1 - rules.min_wait / 2) - EXACT)
        least = max(limits.min, 1, -(-event.before // 2), enough)
        if event.after < least:
            state.wrong(10, f"{event.pool} shrank to {event.after} engines, its figures ask for {least}")


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0.0 else 0.0
