"""Elastic pools: feeds the nodes and the use of time to the policy, applies its decisions and journals them."""

import asyncio
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

from rollart.config.schema import RunConfig
from rollart.control.context import Context
from rollart.control.fleet import Fleet, WorkerSpec
from rollart.control.trainer import POOL as TRAINER
from rollart.policy.elasticity import ElasticityPolicy, Resize, Situation, StepUse
from rollart.policy.placement import how_many, would_do
from rollart.types.elasticity import ElasticPool, ElasticRules
from rollart.types.ids import WorkerId
from rollart.types.journal import EnginesChanged, EnginesForgiven, PoolTime, RoomChanged, TimeUse
from rollart.types.messages import Role
from rollart.types.placement import Node


def elastic_rules(config: RunConfig) -> ElasticRules | None:
    """The rules of a run; None if every pool has a fixed number of engines."""
    pools = config.elastic_pools()
    if not pools:
        return None
    settings = config.elasticity
    return ElasticRules(
        pools={name: ElasticPool(bounds.min, bounds.max, bounds.first) for name, bounds in pools.items()},
        min_wait=settings.min_wait,
        confirm_steps=settings.confirm_steps,
        confirm_s=settings.confirm_s,
        hold_s=settings.hold_s,
        tick_s=settings.tick_s,
        drain_s=config.deadlines.drain_s,
    )


class Requests(Protocol):
    """The requests at engines: those of the LLMProxy."""

    def at_pools(self) -> Iterable[str]:
        """Pool of the engine of every turn at one."""


class ElasticEngines:
    """Owns the timer and the policy. The fleet owns which engines run."""

    def __init__(self, context: Context, fleet: Fleet, rules: ElasticRules) -> None:
        self._context = context
        self._fleet = fleet
        self._rules = rules
        self._policy = ElasticityPolicy(rules)
        self._room: dict[str, int] = {}
        self._nodes: Sequence[Node] = ()
        self._known: dict[str, None] = {}
        """Ids of the nodes that have been seen."""
        self._timer: asyncio.TimerHandle | None = None
        self._specs = {name: fleet.engines(name)[0] for name in rules.pools}
        """One of the engines of each pool, which all need the same."""
        for name, pool in rules.pools.items():
            for spec in fleet.engines(name)[pool.start :]:
                fleet.set_aside(spec.name)
        fleet.observe_nodes(self._nodes_seen)

    def start(self, requests: Requests) -> None:
        """Begin to decide."""
        self._timer = self._context.call_at(self._context.now() + self._rules.tick_s, self._tick, requests)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def step_trained(self, times: Iterable[PoolTime]) -> None:
        """Called after every training step, with the use of time of all pools."""
        spent = {time.pool: time.seconds for time in times}
        trainer = spent.get(TRAINER, {})
        use = {
            name: StepUse(
                math.fsum(trainer.values()),
                trainer.get(TimeUse.ROLLOUT, 0.0),
                math.fsum(spent[name].values()),
                spent[name].get(TimeUse.BUSY, 0.0),
                spent[name].get(TimeUse.TRAINING, 0.0),
                spent[name].get(TimeUse.WEIGHT_SYNC, 0.0),
            )
            for name in self._rules.pools
            if name in spent
        }
        self._policy.step_trained(use)

    def _nodes_seen(self, nodes: Sequence[Node]) -> None:
        joined = [node for node in nodes if node.id not in self._known]
        self._known |= {node.id: None for node in joined}
        self._nodes = nodes
        placed = Counter(spec.pool for _, spec in self._fleet.placed_workers() if spec.role is Role.ENGINE)
        for name, pool in self._rules.pools.items():
            room = min(pool.max, placed[name] + how_many(self._specs[name].needs, nodes, pool.max))
            if room != self._room.get(name):
                self._room[name] = room
                self._context.record(RoomChanged(self._context.now(), name, room))
                self._policy.room(name, room)
            if would_do(self._specs[name].needs, self._specs[name].needs, joined):
                forgiven = self._fleet.forgive(name)  # they may have died with their nodes
                if forgiven:
                    self._context.record(EnginesForgiven(self._context.now(), name, forgiven))

    def _tick(self, requests: Requests) -> None:
        now = self._context.now()
        loads = Counter(requests.at_pools())
        for name in self._rules.pools:
            self._policy.in_flight(name, loads[name])
        resize = self._policy.tick(self._situation(), now)
        if resize is not None:
            self._apply(resize, now)
        self._timer = self._context.call_at(now + self._rules.tick_s, self._tick, requests)

    def _situation(self) -> Situation:
        others = [spec for _, spec in self._fleet.waiting_workers() if spec.pool not in self._rules.pools]
        trainer = [spec for spec in others if spec.role is Role.TRAINER]
        making_room = [spec.pool for _, spec in self._fleet.leaving_workers()]
        giving = [name for name in self._suiting(trainer) if name not in making_room]
        engines = {name: len(self._fleet.engines(name)) for name in self._rules.pools}
        most = {name: engines[name] + len(self._fleet.engines_aside(name)) for name in self._rules.pools}
        return Situation(engines, most, self._suiting(others), tuple(giving))

    def _suiting(self, workers: Sequence[WorkerSpec]) -> tuple[str, ...]:
        """Elastic pools on whose nodes at least one of these workers could run."""
        return tuple(
            name
            for name, spec in self._specs.items()
            if any(would_do(worker.needs, spec.needs, self._nodes) for worker in workers)
        )

    def _apply(self, resize: Resize, now: float) -> None:
        pool, cause, before, after, why, figures, since = resize
        if after > before:
            chosen = [spec.name for spec in sorted(self._fleet.engines_aside(pool), key=_index)][: after - before]
        else:
            chosen = self._dispensable(pool)[: before - after]
        event = EnginesChanged(now, pool, cause, before, after, tuple(chosen), why, figures, since)
        self._context.record(event)
        for name in chosen:
            if after > before:
                self._fleet.add(name)
            else:
                self._fleet.retire(name, why)

    def _dispensable(self, pool: str) -> list[str]:
        """Engines of a pool in the order in which they are removed: those without a node, then the last ones."""
        without: dict[str, WorkerId] = {spec.name: worker for worker, spec in self._fleet.waiting_workers()}

        def order(spec: WorkerSpec) -> tuple[bool, int]:
            return (spec.name in without, _index(spec))

        return [spec.name for spec in sorted(self._fleet.engines(pool), key=order, reverse=True)]


def _index(spec: WorkerSpec) -> int:
    return int(spec.name.rpartition("/")[2])
