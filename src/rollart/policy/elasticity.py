"""Elastic pools: engines are added and removed between a minimum and a maximum.

A pool follows its nodes up to the number of engines that it wants. It wants its maximum at first, then what training
needs: fewer if engines wait for training, more if the trainer waits for rollout (`types.elasticity`).

    wanted, room ──► target = min(wanted, room), within [min, max] ──► held for `confirm_s` ──► Resize

Invariants:

- `min` ≤ engines ≤ `max` after every decision. A pool with engines keeps one, unless its nodes are gone.
- Only one pool changes at a time. A change for nodes needs the same sign of target − engines for `confirm_s`
  without interruption, counted again after each change of any pool: at most one change per `confirm_s`.
- A change for training needs `confirm_steps` whole steps since the last change of any pool that all ask for it. After
  it the pool is held for `hold_s` · 2ⁿ, where n is the number of times that it turned from growing to shrinking or
  back, at most `MAX_TURNS`.
- While another worker waits for a node, room is left to it: no pool on such nodes grows, except from 0. While the
  trainer waits for one, pools above their minimum on such nodes give up one engine per `confirm_s`.

A worked example: a node with room for two engines joins a pool that has one.

    >>> from rollart.types.elasticity import ElasticPool
    >>> rules = ElasticRules({"H20": ElasticPool(1, 4, 1)}, 0.2, 2, 10.0, 60.0, 2.5, 120.0)
    >>> policy = ElasticityPolicy(rules)
    >>> policy.room("H20", 3)
    >>> policy.tick(Situation({"H20": 1}, {"H20": 4}), 100.0)
    >>> policy.tick(Situation({"H20": 1}, {"H20": 4}), 110.0).why
    'H20 1 → 3: its nodes have had room for 3 engines for 10 s'
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rollart.types.elasticity import BUSY, ElasticCause, ElasticFigures, ElasticRules

MAX_TURNS = 5


class Situation(NamedTuple):
    """The elastic pools as they are."""

    engines: Mapping[str, int]
    """Engines that run or are to run."""
    most: Mapping[str, int]
    """The maximum, without engines that were removed because they kept dying."""
    blocked: tuple[str, ...] = ()
    """Pools on whose nodes another worker waits for room."""
    trainer: tuple[str, ...] = ()
    """Pools that could make room for the trainer, while it waits."""


class StepUse(NamedTuple):
    """Worker-seconds of one training step: of the trainer, and of a pool's engines."""

    trainer: float
    trainer_rollout: float
    engines: float
    busy: float
    training: float
    sync: float


class Resize(NamedTuple):
    """See `types.journal.EnginesChanged`."""

    pool: str
    cause: ElasticCause
    before: int
    after: int
    why: str
    figures: ElasticFigures
    since: float


class _Pool:
    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.room: int | None = None
        self.since: tuple[int, float] | None = None
        """Sign of target − engines, and since when."""
        self.direction = 0
        self.turns = 0
        self.held_until = -math.inf
        self.forget()

    def forget(self) -> None:
        """Discard the figures collected before the number of engines changed."""
        self.steps: list[StepUse] = []
        self.fresh = False
        """Whether a whole step has begun since the last change."""
        self.in_flight = 0.0
        self.samples = 0
        self.since = None


class ElasticityPolicy:
    """Decides the number of engines of elastic pools; see the module. Call `tick` every `rules.tick_s`."""

    def __init__(self, rules: ElasticRules) -> None:
        self._rules = rules
        self._pools = {name: _Pool(pool.max) for name, pool in rules.pools.items()}
        self._trainer_since: float | None = None

    # --- what happens -----------------------------------------------------------------------------------------------

    def room(self, pool: str, engines: int) -> None:
        """The nodes have room for this many engines of the pool, those running included."""
        self._pools[pool].room = engines

    def in_flight(self, pool: str, requests: int) -> None:
        """A sample of the requests at the pool's engines."""
        entry = self._pools[pool]
        entry.in_flight += requests
        entry.samples += 1

    def step_trained(self, use: Mapping[str, StepUse]) -> None:
        """A training step ended. `use` lacks pools without engines."""
        for name, pool in self._pools.items():
            if name in use and pool.fresh:
                pool.steps = [*pool.steps, use[name]][-self._rules.confirm_steps :]
            pool.fresh = name in use

    # --- decisions --------------------------------------------------------------------------------------------------

    def tick(self, pools: Situation, now: float) -> Resize | None:
        """The next change, if one is due."""
        resize = self._failed(pools, now) or self._trainer(pools, now)
        nodes = self._nodes(pools, now)
        resize = resize or nodes or self._training(pools, now)
        if resize is not None:
            self._changed(resize, now)
        return resize

    def _changed(self, resize: Resize, now: float) -> None:
        for pool in self._pools.values():
            pool.forget()
        self._trainer_since = None
        if resize.cause not in (ElasticCause.ROLLOUT, ElasticCause.TRAINING):
            return
        pool = self._pools[resize.pool]
        pool.wanted = resize.after
        direction = 1 if resize.after > resize.before else -1
        if pool.direction == -direction:
            pool.turns = min(pool.turns + 1, MAX_TURNS)
        pool.direction = direction
        pool.held_until = now + self._rules.hold_s * 2**pool.turns

    def _failed(self, pools: Situation, now: float) -> Resize | None:
        """Restore the minimum of a pool whose engines were removed because they kept dying."""
        for name, limits in self._rules.pools.items():
            count, after = pools.engines[name], min(limits.min, pools.most[name])
            if count < after:
                reason = "engines that kept dying were removed"
                return self._resize(name, ElasticCause.FAILED, count, after, reason, now)
        return None

    def _trainer(self, pools: Situation, now: float) -> Resize | None:
        """Remove an engine to make room for the trainer."""
        if not pools.trainer:
            self._trainer_since = None
            return None
        if self._trainer_since is None:
            self._trainer_since = now
        since = self._trainer_since
        if now - since < self._rules.confirm_s:
            return None
        for name in pools.trainer:
            count = pools.engines[name]
            if count > self._least(name):
                reason = f"the trainer has waited for a node for {now - since:.3g} s"
                return self._resize(name, ElasticCause.TRAINER, count, count - 1, reason, since)
        return None

    def _nodes(self, pools: Situation, now: float) -> Resize | None:
        """Resize a pool to the engines that it wants and its nodes have had room for."""
        found = None
        for name, limits in self._rules.pools.items():
            pool, count = self._pools[name], pools.engines[name]
            if pool.room is None:
                continue
            target = min(max(limits.min, min(pool.wanted, pool.room)), pools.most[name])
            sign = (target > count) - (target < count)
            if sign > 0 and name in pools.blocked and count:
                sign = 0
            if not sign:
                pool.since = None
                continue
            if pool.since is None or pool.since[0] != sign:
                pool.since = (sign, now)
            since = pool.since[1]
            if found is None and now - since >= self._rules.confirm_s:
                reason = f"its nodes have had room for {_engines(pool.room)} for {now - since:.3g} s"
                found = self._resize(name, ElasticCause.NODES, count, target, reason, since)
        return found

    def _training(self, pools: Situation, now: float) -> Resize | None:
        """Pools whose engines are too few or too many for the trainer."""
        for name, pool in self._pools.items():
            count = pools.engines[name]
            if not count or now < pool.held_until or len(pool.steps) < self._rules.confirm_steps:
                continue
            figures, since = self._figures(name, count), now - math.fsum(each.trainer for each in pool.steps)
            if self._waits_for_rollout(pool.steps):
                after = min(self._more(count, figures), pools.most[name])
                if after > count and name not in pools.blocked:
                    reason = f"the trainer waited for rollout for {figures.wait:.0%} of the time"
                    return self._resize(name, ElasticCause.ROLLOUT, count, after, reason, since)
            elif self._waits_for_training(pool.steps):
                after = max(self._least(name), -(-count // 2), self._enough(figures))
                if after < count:
                    reason = f"its engines waited for training for {figures.idle:.0%} of the time"
                    return self._resize(name, ElasticCause.TRAINING, count, after, reason, since)
        return None

    def _waits_for_rollout(self, steps: Sequence[StepUse]) -> bool:
        return all(_wait(step) >= self._rules.min_wait and _busy(step) >= BUSY for step in steps)

    def _waits_for_training(self, steps: Sequence[StepUse]) -> bool:
        least = self._rules.min_wait
        return all(_share(step.training, step.engines) >= least and _wait(step) < least / 2 for step in steps)

    def _more(self, count: int, figures: ElasticFigures) -> int:
        """Number of engines with which the trainer would not wait, limited by requests in flight and by room."""
        ideal = math.ceil(count / max(1.0 - figures.wait, 0.5))
        room = ideal if figures.room is None else figures.room
        return min(ideal, int(figures.in_flight), room)

    def _enough(self, figures: ElasticFigures) -> int:
        """Engines that would be busy for most of the time."""
        return math.ceil(figures.busy_engines / (1.0 - self._rules.min_wait / 2))

    def _least(self, name: str) -> int:
        return max(1, self._rules.pools[name].min)

    # --- figures ----------------------------------------------------------------------------------------------------

    def _figures(self, name: str, count: int) -> ElasticFigures:
        pool = self._pools[name]
        in_flight = pool.in_flight / pool.samples if pool.samples else 0.0
        if not pool.steps:
            return ElasticFigures(pool.room, in_flight=in_flight)
        total = StepUse(*(math.fsum(column) for column in zip(*pool.steps, strict=True)))
        return ElasticFigures(
            pool.room,
            _wait(total),
            _busy(total),
            _share(total.training, total.engines),
            count * _share(total.busy, total.engines),
            in_flight,
            len(pool.steps),
        )

    def _resize(self, name: str, cause: ElasticCause, before: int, after: int, reason: str, since: float) -> Resize:
        why = f"{name} {before} → {after}: {reason}"
        return Resize(name, cause, before, after, why, self._figures(name, before), since)


def _wait(step: StepUse) -> float:
    return _share(step.trainer_rollout, step.trainer)


def _busy(step: StepUse) -> float:
    return _share(step.busy, step.engines - step.training - step.sync)


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0.0 else 0.0


def _engines(count: int) -> str:
    return "1 engine" if count == 1 else f"{count or 'no'} engines"
