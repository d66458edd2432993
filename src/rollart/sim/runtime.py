"""Virtual runtime: workers as timers of the virtual loop.

A worker is driven when commands arrive and at its `wake_at`. Commands posted in one pass of the loop reach the worker
together, after the pass. Driving workers is half of a simulation's work, hence the bare `Alarm`s.
"""

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rollart.policy.placement import Wait
from rollart.ports.factory import load
from rollart.ports.runtime import Listener
from rollart.ports.worker import Worker
from rollart.sim.loop import Alarm, VirtualLoop
from rollart.sim.nodes import SimNodes
from rollart.sim.scenario import NodeModel
from rollart.types.errors import InvariantBroken, RequestError
from rollart.types.ids import WorkerId
from rollart.types.messages import Role, WorkerCommand
from rollart.types.placement import NOTHING, Needs

logger = logging.getLogger(__name__)


class NodeLost(Exception):
    """The node of a worker is gone."""


class _Hosted(Alarm):
    """A worker. `scheduled`: commands have arrived, and it is in the loop as its own alarm."""

    __slots__ = ("id", "needs", "pending", "queued_at", "runtime", "scheduled", "timer", "wake_at", "worker")

    def __init__(self, id: WorkerId, runtime: "VirtualRuntime", needs: Needs) -> None:
        super().__init__()
        self.id = id
        self.needs = needs
        self.runtime = runtime
        self.worker: Worker | None = None
        self.pending: list[WorkerCommand] = []
        self.scheduled = False
        self.timer = _Timer(self)
        self.wake_at = math.inf
        self.queued_at = math.inf
        """Time of the queued timer: `wake_at`, or earlier if that has been postponed since."""

    def _run(self) -> None:
        self.scheduled = False
        self.runtime.drive(self)


class _Timer(Alarm):
    """Drives a worker at its `wake_at`. Postponing a wake-up costs nothing until the earlier one fires."""

    __slots__ = ("hosted",)

    def __init__(self, hosted: _Hosted) -> None:
        super().__init__()
        self.hosted = hosted

    def _run(self) -> None:
        self.hosted.runtime.ring(self.hosted)


class VirtualRuntime:
    """Hosts workers on the running virtual loop. Must be built inside it.

    With `nodes`, workers that need something of a node wait until one has room for them.
    """

    def __init__(self, nodes: Sequence[NodeModel] = ()) -> None:
        loop = asyncio.get_running_loop()
        if not isinstance(loop, VirtualLoop):
            raise InvariantBroken("a virtual runtime needs a virtual loop")
        self._loop = loop
        self._hosted: dict[WorkerId, _Hosted] = {}
        self._known: set[WorkerId] = set()
        self._listener: Listener | None = None
        self._models = nodes
        self._nodes: SimNodes | None = None
        """Set once there is a listener, if there are nodes."""
        self._unplaced: dict[WorkerId, tuple[str, Mapping[str, Any]]] = {}
        """Workers without a node: factory and settings."""
        self._why: dict[WorkerId, str] = {}
        """What they wait for, as the listener knows it."""

    def listen(self, listener: Listener) -> None:
        self._listener = listener
        if self._models:
            self._nodes = SimNodes(self._models, self._loop.call_at, self._node_drains, self._node_lost)

    def spawn(
        self,
        worker: WorkerId,
        role: Role,  # noqa: ARG002
        factory: str,
        settings: Mapping[str, Any],
        *,
        python: str = "",
        needs: Needs = NOTHING,
    ) -> None:
        if python:
            raise RequestError(f"worker {worker} cannot run with {python}: in virtual time there are no processes")
        if worker in self._known:
            raise InvariantBroken(f"worker id {worker} was used before; a restarted worker needs a new one")
        self._known.add(worker)
        hosted = self._hosted[worker] = _Hosted(worker, self, needs)
        if self._nodes is None or not needs.resources:
            self._loop.call_soon(self._build, hosted, factory, settings)
            return
        self._unplaced[worker] = (factory, settings)
        self._loop.call_soon(self._place_waiting)

    def post(self, worker: WorkerId, commands: Sequence[WorkerCommand]) -> None:
        hosted = self._hosted.get(worker)
        if hosted is None:
            return
        hosted.pending.extend(commands)
        if not hosted.scheduled and hosted.worker is not None:
            hosted.scheduled = True
            self._loop.alarm_soon(hosted)

    def stop(self, worker: WorkerId) -> None:
        hosted = self._hosted.pop(worker, None)
        if hosted is not None:
            self._release(hosted)

    def drain(self, target: str) -> int:
        """The nodes of all workers whose ids begin with `target` drain; returns their number."""
        drained = [worker for worker in self._hosted if worker.startswith(target)]
        for worker in drained:
            self._tell().leaves(worker, "its node drains")
        return len(drained)

    # Nodes.

    def _place_waiting(self) -> None:
        """Start the workers that have room by now, first come, first served."""
        nodes = self._nodes
        assert nodes is not None
        for worker, (factory, settings) in list(self._unplaced.items()):
            hosted = self._hosted[worker]
            found = nodes.take(worker, hosted.needs)
            if isinstance(found, Wait):
                if self._why.get(worker) != found.why:
                    self._why[worker] = found.why
                    self._tell().waits(worker, found.why)
                continue
            del self._unplaced[worker]
            self._why.pop(worker, None)
            self._tell().placed(worker, found.name, "")
            self._loop.call_soon(self._build, hosted, factory, settings)
        self._tell().nodes_seen(nodes.now())

    def _node_drains(self, workers: list[WorkerId]) -> None:
        for worker in workers:
            self._tell().leaves(worker, "its node drains")
        self._place_waiting()

    def _node_lost(self, workers: list[WorkerId]) -> None:
        for worker in workers:
            if worker in self._hosted:
                self._die(self._hosted[worker], NodeLost("its node is gone"))
        self._place_waiting()

    async def close(self) -> None:
        for worker in list(self._hosted):
            self.stop(worker)

    def _build(self, hosted: _Hosted, factory: str, settings: Mapping[str, Any]) -> None:
        if hosted.id not in self._hosted:
            return
        try:
            hosted.worker = load(factory)(settings, lambda: self._wake(hosted))
            info = hosted.worker.info()
        except Exception as error:  # noqa: BLE001 - anything a worker raises is its own death
            self._die(hosted, error)
            return
        self._tell().joined(hosted.id, info)
        self._wake(hosted)

    def _wake(self, hosted: _Hosted) -> None:
        if hosted.id in self._hosted and not hosted.scheduled:
            hosted.scheduled = True
            self._loop.alarm_soon(hosted)

    def ring(self, hosted: _Hosted) -> None:
        """Handle a worker's timer."""
        now = self._loop.time()
        if hosted.queued_at != now:
            return  # superseded by an earlier timer, which has fired
        hosted.queued_at = math.inf
        if hosted.wake_at <= now:
            self.drive(hosted)
        elif hosted.wake_at < math.inf:
            hosted.queued_at = hosted.wake_at
            self._loop.alarm_at(hosted.wake_at, hosted.timer)

    def drive(self, hosted: _Hosted) -> None:
        """Deliver posted commands, and let the worker advance."""
        worker = hosted.worker
        if worker is None:
            return
        now = self._loop.time()
        try:
            if hosted.pending:
                commands, hosted.pending = hosted.pending, []
                worker.post(commands)
            advance = worker.advance(now)
        except Exception as error:  # noqa: BLE001 - as above
            self._die(hosted, error)
            return
        wake_at = advance.wake_at
        hosted.wake_at = wake_at = math.inf if wake_at is None else wake_at if wake_at > now else now
        if wake_at < hosted.queued_at:
            hosted.queued_at = wake_at
            self._loop.alarm_at(wake_at, hosted.timer)
        if advance.events:
            self._tell().events(hosted.id, advance.events)

    def _die(self, hosted: _Hosted, error: Exception) -> None:
        self._hosted.pop(hosted.id, None)
        self._release(hosted)
        self._tell().died(hosted.id, f"{type(error).__name__}: {error}")

    def _release(self, hosted: _Hosted) -> None:
        hosted.wake_at = math.inf
        self._unplaced.pop(hosted.id, None)
        self._why.pop(hosted.id, None)
        if self._nodes is not None and hosted.needs.resources:
            self._nodes.give_back(hosted.id, hosted.needs)
            self._loop.call_soon(self._place_waiting)
        worker, hosted.worker = hosted.worker, None
        if worker is not None:
            try:
                worker.close()
            except Exception as error:  # noqa: BLE001 - the worker is gone; only a reader of the log can act on this
                logger.warning("worker %s failed to close: %s: %s", hosted.id, type(error).__name__, error)

    def _tell(self) -> Listener:
        if self._listener is None:
            raise InvariantBroken("spawn before listen: the worker's events would be lost")
        return self._listener
