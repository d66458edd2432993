"""The workers of a run: spawned, restarted, and their events dispatched.

Every worker is one incarnation of a spec. When it dies, its spec is restarted after a back-off; when it keeps dying,
the spec is removed and the rest of the role carries on. A role without a spec ends the run. Events of a worker that is
gone are ignored.

A worker that should leave its node is drained: its successor is started, its role gives it no new work, and it is
stopped once it has finished, or after `deadlines.drain_s`. There is one trainer, so its successor starts afterwards.

A spec may be set aside: it is not started until it is added. One that is retired drains without a successor, and is
set aside again.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rollart.control.context import Context
from rollart.policy.health import ENGINE, WORKER, GiveUp, HealthBook, Retry
from rollart.policy.watch import Wait
from rollart.ports.runtime import Runtime
from rollart.types.errors import RuntimeLost, WorkerLost
from rollart.types.ids import WorkerId
from rollart.types.journal import (
    WorkerDied,
    WorkerJoined,
    WorkerLeaves,
    WorkerLeft,
    WorkerPlaced,
    WorkerSpawned,
    WorkerWaits,
)
from rollart.types.messages import Role, WorkerCommand, WorkerEvent, WorkerInfo
from rollart.types.placement import NOTHING, Needs, Node

LOADS_MODEL = (Role.ENGINE, Role.TRAINER)


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """How to start a worker, as often as needed."""

    name: str
    role: Role
    pool: str
    factory: str
    settings: Mapping[str, Any]
    hardware: str = ""
    python: str = ""
    """Path of the interpreter to run it with; the controller's unless given."""
    needs: Needs = NOTHING
    """What it reserves of its node."""
    ranks: int = 1
    """Number of processes that reserve this much each, on any nodes; the worker starts all but the first itself."""


class RoleHandler(Protocol):
    """The part of the control plane that a role's workers belong to."""

    def worker_joined(self, worker: WorkerId, spec: WorkerSpec, info: WorkerInfo) -> None: ...

    def worker_leaves(self, worker: WorkerId) -> None:
        """Give it no new work, and call `Fleet.finished` once it has none left."""
        ...

    def worker_left(self, worker: WorkerId, spec: WorkerSpec, reason: str) -> None: ...


class Fleet:
    """Spawns workers, restarts them, and dispatches their events to the registered handlers."""

    def __init__(self, context: Context, runtime: Runtime, specs: Sequence[WorkerSpec]) -> None:
        self._context = context
        self._runtime = runtime
        self._specs = {spec.name: spec for spec in specs}
        self._incarnation: dict[str, int] = {}
        self._alive: dict[WorkerId, WorkerSpec] = {}
        self._roles: dict[Role, list[RoleHandler]] = {}
        self._handlers: dict[type, Callable[[WorkerId, Any], None]] = {}
        seed = context.config.seed
        self._health = {role: HealthBook(ENGINE if role is Role.ENGINE else WORKER, seed) for role in Role}
        self._closing = False
        self._joining: dict[WorkerId, Wait] = {}
        self._leaving: dict[WorkerId, Wait] = {}
        self._why_leaving: dict[WorkerId, str] = {}
        self._aside: dict[str, WorkerSpec] = {}
        """Specs that are not to run."""
        self._broken: dict[str, WorkerSpec] = {}
        """Specs that were removed because their workers kept dying."""
        self._restarts: dict[str, asyncio.TimerHandle] = {}
        """Specs whose worker died and is restarted after a back-off."""
        self._waiting: dict[WorkerId, None] = {}
        """Workers without a node."""
        self._placed: dict[WorkerId, None] = {}
        """Workers with a node; only on runtimes that have several."""
        self._observers: list[Callable[[Sequence[Node]], None]] = []
        self.post: Callable[[WorkerId, Sequence[WorkerCommand]], None] = runtime.post
        runtime.listen(self)

    def attach(self, role: Role, handler: RoleHandler) -> None:
        """Notify `handler` of the workers of a role. Handlers are called in the order of attachment."""
        self._roles.setdefault(role, []).append(handler)

    def on(self, event: type[WorkerEvent], handler: Callable[[WorkerId, Any], None]) -> None:
        """Register the handler of an event type."""
        self._handlers[event] = handler

    def observe_nodes(self, observer: Callable[[Sequence[Node]], None]) -> None:
        """Notify `observer` of the nodes of the runtime."""
        self._observers.append(observer)

    def start(self) -> None:
        for spec in list(self._specs.values()):
            self._spawn(spec)

    def replace(self, worker: WorkerId, reason: str) -> None:
        """Declare a worker dead (silent, or past a deadline) and restart its spec."""
        if worker in self._alive:
            self._runtime.stop(worker)
            self.died(worker, reason)

    # Specs that come and go.

    def set_aside(self, name: str) -> None:
        """Do not start this spec; before `start`."""
        self._aside[name] = self._specs.pop(name)

    def engines(self, pool: str) -> list[WorkerSpec]:
        """Engines of a pool that run or are to run."""
        return [spec for spec in self._specs.values() if spec.role is Role.ENGINE and spec.pool == pool]

    def engines_aside(self, pool: str) -> list[WorkerSpec]:
        """Engines of a pool that are set aside."""
        return [spec for spec in self._aside.values() if spec.pool == pool]

    def placed_workers(self) -> list[tuple[WorkerId, WorkerSpec]]:
        """Workers with a node that they are not leaving."""
        return [(worker, self._alive[worker]) for worker in self._placed if worker not in self._leaving]

    def leaving_workers(self) -> list[tuple[WorkerId, WorkerSpec]]:
        """Workers that finish their work before they are stopped."""
        return [(worker, self._alive[worker]) for worker in self._leaving]

    def waiting_workers(self) -> list[tuple[WorkerId, WorkerSpec]]:
        """Workers without a node."""
        return [(worker, self._alive[worker]) for worker in self._waiting]

    def forgive(self, pool: str) -> tuple[str, ...]:
        """Engines of the pool that were removed because they kept dying are set aside instead; returns their names."""
        names = tuple(name for name, spec in self._broken.items() if spec.pool == pool)
        for name in names:
            self._aside[name] = self._broken.pop(name)
            self._health[Role.ENGINE].forget(name)
        return names

    def add(self, name: str) -> None:
        """Start a spec that was set aside."""
        self._specs[name] = spec = self._aside.pop(name)
        self._spawn(spec)

    def retire(self, name: str, why: str) -> None:
        """Drain the worker of a spec, without a successor, and set the spec aside."""
        self._aside[name] = self._specs.pop(name)
        restart = self._restarts.pop(name, None)
        if restart is not None:
            restart.cancel()
        for worker in [worker for worker, spec in self._alive.items() if spec.name == name]:
            self._leaves(worker, why)

    def succeeded(self, worker: WorkerId) -> None:
        """The worker did useful work: earlier deaths of its spec no longer count against it."""
        spec = self._alive.get(worker)
        if spec is not None:
            self._health[spec.role].succeeded(spec.name, self._context.now())

    def finished(self, worker: WorkerId, *, unfinished: bool = False) -> None:
        """A worker that was leaving has finished its work, or ran out of time: stop it. Idempotent."""
        if worker not in self._leaving:
            return
        spec = self._gone(worker)
        assert spec is not None
        why = self._why_leaving[worker]
        self._left(worker)
        self._runtime.stop(worker)
        self._context.record(WorkerLeft(self._context.now(), worker, unfinished))
        for handler in self._roles.get(spec.role, ()):
            handler.worker_left(worker, spec, why)
        if spec.role is Role.TRAINER:
            self._spawn(spec)

    async def close(self) -> None:
        self._closing = True
        for worker in list(self._joining):
            self._started(worker)
        for worker in list(self._leaving):
            self._left(worker)
        self._alive.clear()
        self._waiting.clear()
        self._placed.clear()
        await self._runtime.close()

    # Callbacks of the runtime.

    def waits(self, worker: WorkerId, why: str) -> None:
        spec = self._alive.get(worker)
        if spec is None:
            return
        self._waiting[worker] = None
        self._context.record(WorkerWaits(self._context.now(), worker, why))
        self._started(worker)
        self._guard_node(worker, spec, why)

    def placed(self, worker: WorkerId, node: str, why: str) -> None:
        spec = self._alive.get(worker)
        if spec is None:
            return
        self._waiting.pop(worker, None)
        self._placed[worker] = None
        self._context.record(WorkerPlaced(self._context.now(), worker, node, why))
        self._started(worker)
        self._guard_start(worker, spec)

    def nodes_seen(self, nodes: Sequence[Node]) -> None:
        if self._closing:
            return
        with self._context.nursery.boundary:
            for observer in self._observers:
                observer(nodes)

    def leaves(self, worker: WorkerId, why: str) -> None:
        with self._context.nursery.boundary:
            self._leaves(worker, why)

    def _leaves(self, worker: WorkerId, why: str) -> None:
        spec = self._alive.get(worker)
        if spec is None or worker in self._leaving or self._closing:
            return
        joined = worker not in self._joining
        self._context.record(WorkerLeaves(self._context.now(), worker, why))
        self._started(worker)
        self._why_leaving[worker] = why
        self._leaving[worker] = self._context.waits.guard(
            str(worker),
            f"the end of its work ({why})",
            self._context.config.deadlines.drain_s,
            "it is stopped",
            lambda _: self.finished(worker, unfinished=True),
        )
        if spec.role is not Role.TRAINER:
            self._spawn(spec)
        if not joined:
            self.finished(worker)
            return
        for handler in self._roles.get(spec.role, ()):
            handler.worker_leaves(worker)

    def _left(self, worker: WorkerId) -> bool:
        """Clear the drain state of a worker; returns whether it was draining."""
        wait = self._leaving.pop(worker, None)
        self._why_leaving.pop(worker, None)
        if wait is not None:
            self._context.waits.close(wait)
        return wait is not None

    def joined(self, worker: WorkerId, info: WorkerInfo) -> None:
        spec = self._alive.get(worker)
        if spec is None:
            return
        self._started(worker)
        self._context.record(WorkerJoined(self._context.now(), worker))
        with self._context.nursery.boundary:
            for handler in self._roles.get(spec.role, ()):
                handler.worker_joined(worker, spec, info)

    def events(self, worker: WorkerId, events: Sequence[WorkerEvent]) -> None:
        # `nursery.boundary` inlined: this is the hot path, two events per turn.
        try:
            for event in events:
                if worker not in self._alive:
                    return
                self._handlers[type(event)](worker, event)
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends the run
            self._context.nursery.fail(error)

    def died(self, worker: WorkerId, reason: str) -> None:
        with self._context.nursery.boundary:
            self._died(worker, reason)

    def failed(self, error: RuntimeLost) -> None:
        self._context.nursery.fail(error)

    def _died(self, worker: WorkerId, reason: str) -> None:
        spec = self._gone(worker)
        self._started(worker)
        if spec is None or self._closing:
            return
        now = self._context.now()
        if self._left(worker):
            self._context.record(WorkerDied(now, worker, reason, "it was leaving"))
            if spec.role is Role.TRAINER:
                self._spawn(spec)
            for handler in self._roles.get(spec.role, ()):
                handler.worker_left(worker, spec, reason)
            return
        verdict = self._health[spec.role].failed(spec.name, now, reason)
        if isinstance(verdict, GiveUp):
            self._context.record(WorkerDied(now, worker, reason, "removed: it keeps dying"))
            self._broken[spec.name] = self._specs.pop(spec.name)
        else:
            at = verdict.at if isinstance(verdict, Retry) else verdict.until
            self._context.record(WorkerDied(now, worker, reason, f"restarts in {at - now:.3g} s"))
            self._restarts[spec.name] = self._context.call_at(at, self._spawn, spec)
        for handler in self._roles.get(spec.role, ()):
            handler.worker_left(worker, spec, reason)
        if not any(other.role is spec.role for other in self._specs.values()):
            self._context.nursery.fail(
                WorkerLost(
                    f"no {spec.role.value} worker is left; the last one, {worker}, died of: {reason}. "
                    "Every worker of the role was restarted and died again: fix the cause and resume."
                )
            )

    def _spawn(self, spec: WorkerSpec) -> None:
        self._restarts.pop(spec.name, None)
        if self._closing or spec.name not in self._specs:
            return
        number = self._incarnation.get(spec.name, 0)
        self._incarnation[spec.name] = number + 1
        worker = WorkerId(f"{spec.name}.{number}")
        self._alive[worker] = spec
        self._context.record(WorkerSpawned(self._context.now(), worker, spec.role, spec.pool))
        self._guard_start(worker, spec)
        self._runtime.spawn(worker, spec.role, spec.factory, spec.settings, python=spec.python, needs=spec.needs)

    def _gone(self, worker: WorkerId) -> WorkerSpec | None:
        """Forget a worker; None if it is unknown."""
        self._waiting.pop(worker, None)
        self._placed.pop(worker, None)
        return self._alive.pop(worker, None)

    def _guard_start(self, worker: WorkerId, spec: WorkerSpec) -> None:
        deadlines = self._context.config.deadlines
        seconds = deadlines.model_loads_s if spec.role in LOADS_MODEL else deadlines.worker_starts_s
        self._joining[worker] = self._context.waits.guard(
            str(worker), "its start", seconds, "it is replaced", lambda _: self.replace(worker, "it did not come up")
        )

    def _guard_node(self, worker: WorkerId, spec: WorkerSpec, why: str) -> None:
        """A worker waits for a node as long as others of its role work; after `node_s` without any, the run ends."""

        def expired(_: object) -> None:
            self._joining.pop(worker, None)
            if any(
                other.role is spec.role and id not in self._joining for id, other in self._alive.items() if id != worker
            ):
                self._guard_node(worker, spec, why)
            else:
                self._context.nursery.fail(
                    WorkerLost(
                        f"no {spec.role.value} worker has had a node for {seconds:g} s; {worker} waits: {why}. "
                        "Free or add nodes and resume, or raise deadlines.node_s."
                    )
                )

        seconds = self._context.config.deadlines.node_s
        self._joining[worker] = self._context.waits.guard(
            str(worker), f"a node ({why})", seconds, "it waits on while others of its role work", expired
        )

    def _started(self, worker: WorkerId) -> None:
        wait = self._joining.pop(worker, None)
        if wait is not None:
            self._context.waits.close(wait)
