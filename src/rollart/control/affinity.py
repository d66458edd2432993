"""Automatic affinity: feeds the reports of engines to the policy, applies its decisions and journals them."""

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

from rollart.config.schema import RunConfig
from rollart.control.context import Context
from rollart.policy.affinity import AffinityPolicy
from rollart.policy.routing import measures
from rollart.types.affinity import AffinityRules
from rollart.types.journal import AffinityChanged
from rollart.types.messages import TaskWork


def affinity_rules(config: RunConfig) -> AffinityRules | None:
    """The rules of a run; None if no task finds its class by measurement."""
    classes = config.automatic_tasks()
    if not classes:
        return None
    settings = config.affinity
    declared = {task: config.declared_class(task) for task in config.tasks}
    return AffinityRules(
        classes=classes,
        declared={task: hardware for task, hardware in declared.items() if hardware is not None},
        pools={name: pool.hardware or name for name, pool in config.pools.items() if pool.range.max},
        explore=settings.explore,
        min_gain=settings.min_gain,
        confirm_s=settings.confirm_s,
        hold_s=settings.hold_s,
        tick_s=settings.tick_s,
    )


class Requests(Protocol):
    """Router of the turns in flight; implemented by LLMProxy."""

    def in_flight(self) -> Iterable[tuple[str, str]]:
        """Task and hardware class of every request at an engine."""

    def prefer(self, task: str, hardware: str | None) -> None:
        """Run a task on this class from here on; None for no preference."""


class AutomaticAffinity:
    """Owns the timer and the policy. Classes of tasks are decided by the policy alone."""

    def __init__(self, context: Context, rules: AffinityRules) -> None:
        self._context = context
        self._policy = AffinityPolicy(rules)
        self._tick_s = rules.tick_s
        self._timer: asyncio.TimerHandle | None = None

    def start(self, requests: Requests) -> None:
        """Begin to decide."""
        self._timer = self._context.call_at(self._context.now() + self._tick_s, self._tick, requests)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def engine_joined(self, hardware: str, slots: int) -> None:
        self._policy.engine_joined(hardware, slots)

    def engine_left(self, hardware: str) -> None:
        self._policy.engine_left(hardware, self._context.now())

    def worked(self, hardware: str, work: Sequence[TaskWork]) -> None:
        self._policy.worked(hardware, work, self._context.now())

    def step_trained(self) -> None:
        self._policy.step_trained(self._context.now())

    def probe(self, task: str) -> str | None:
        """The class that a new trajectory should measure."""
        return self._policy.probe(task, self._context.now())

    def placed(self, task: str, probe: str | None, reason: str) -> None:
        """A new trajectory was placed."""
        measured = probe if probe is not None and reason == measures(probe) else None
        self._policy.placed(task, measured, self._context.now())

    def _tick(self, requests: Requests) -> None:
        now = self._context.now()
        decision = self._policy.tick(Counter(requests.in_flight()), now)
        if decision is not None:
            for task in decision.why:
                requests.prefer(task, decision.assigned.get(task))
            self._context.record(AffinityChanged(now, *decision))
        self._timer = self._context.call_at(now + self._tick_s, self._tick, requests)
