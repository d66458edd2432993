"""A virtual runtime whose links lose, duplicate, delay and reorder packets, and are cut for seconds at a time.

Both ends of every link use `ports.channel`, so nothing is lost above it: a bad link causes only delay, and a silent one
a dead worker, as in every runtime.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rollart.ports.channel import Endpoint, Packet
from rollart.ports.runtime import Listener
from rollart.sim.draws import uniform
from rollart.sim.faults import Injections
from rollart.sim.runtime import VirtualRuntime
from rollart.sim.scenario import NodeModel
from rollart.types.errors import InvariantBroken, RuntimeLost
from rollart.types.ids import WorkerId
from rollart.types.messages import Role, WorkerCommand, WorkerEvent, WorkerInfo
from rollart.types.placement import NOTHING, Needs, Node

ROW = 24


class LinkFaults(NamedTuple):
    """How bad the links are. A cut of `cut_s` occurs every `cut_every_s`; 0: never."""

    seed: int
    loss: float = 0.0
    double: float = 0.0
    delay_s: float = 0.01
    cut_s: float = 0.0
    cut_every_s: float = 60.0
    resend_s: float = 0.5
    silent_s: float = 20.0


class _Link:
    def __init__(self, worker: WorkerId, faults: LinkFaults, now: float) -> None:
        self.worker = worker
        self.controller: Endpoint[WorkerCommand, WorkerEvent] = _endpoint(faults, now)
        self.host: Endpoint[WorkerEvent, WorkerCommand] = _endpoint(faults, now)
        self.timer: asyncio.TimerHandle | None = None


class LossyRuntime:
    """Wraps a `VirtualRuntime`; must be built inside the running loop."""

    def __init__(self, faults: LinkFaults, injections: Injections, nodes: Sequence[NodeModel] = ()) -> None:
        self._loop = asyncio.get_running_loop()
        self._inner = VirtualRuntime(nodes)
        self._faults = faults
        self._injections = injections
        self._links: dict[WorkerId, _Link] = {}
        self._listener: Listener | None = None
        self._packets = 0

    def listen(self, listener: Listener) -> None:
        self._listener = listener
        self._inner.listen(self)

    def spawn(
        self,
        worker: WorkerId,
        role: Role,
        factory: str,
        settings: Mapping[str, Any],
        *,
        python: str = "",
        needs: Needs = NOTHING,
    ) -> None:
        self._inner.spawn(worker, role, factory, settings, python=python, needs=needs)
        self._links[worker] = _Link(worker, self._faults, self._loop.time())

    def post(self, worker: WorkerId, commands: Sequence[WorkerCommand]) -> None:
        link = self._links.get(worker)
        if link is not None:
            link.controller.send(tuple(commands), self._loop.time())
            self._loop.call_soon(self._pump, link)

    def stop(self, worker: WorkerId) -> None:
        self._drop(worker)
        self._inner.stop(worker)

    def drain(self, target: str) -> int:
        return self._inner.drain(target)

    async def close(self) -> None:
        for worker in list(self._links):
            self._drop(worker)
        await self._inner.close()

    # Listener of the inner runtime.

    def nodes_seen(self, nodes: Sequence[Node]) -> None:
        self._tell().nodes_seen(nodes)

    def waits(self, worker: WorkerId, why: str) -> None:
        self._tell().waits(worker, why)

    def placed(self, worker: WorkerId, node: str, why: str) -> None:
        self._tell().placed(worker, node, why)

    def leaves(self, worker: WorkerId, why: str) -> None:
        self._tell().leaves(worker, why)

    def joined(self, worker: WorkerId, info: WorkerInfo) -> None:
        self._tell().joined(worker, info)

    def events(self, worker: WorkerId, events: Sequence[WorkerEvent]) -> None:
        link = self._links.get(worker)
        if link is not None:
            link.host.send(tuple(events), self._loop.time())
            self._pump(link)

    def died(self, worker: WorkerId, reason: str) -> None:
        self._drop(worker)
        self._tell().died(worker, reason)

    def failed(self, error: RuntimeLost) -> None:
        self._tell().failed(error)

    # The link.

    def _pump(self, link: _Link) -> None:
        """Transmit what is due on both sides, and schedule the next call."""
        if self._links.get(link.worker) is not link:
            return
        now = self._loop.time()
        if link.controller.dead(now) or link.host.dead(now):
            self._inner.stop(link.worker)
            self.died(link.worker, f"its link is silent for {self._faults.silent_s:g} s")
            return
        to_host = link.controller.packet(now)
        if to_host is not None:
            self._transmit(link, to_host, to_host=True)
        to_controller = link.host.packet(now)
        if to_controller is not None:
            self._transmit(link, to_controller, to_host=False)
        if link.timer is not None:
            link.timer.cancel()
            link.timer = None
        wakes = [wake for wake in (link.controller.next_wake(), link.host.next_wake()) if wake is not None]
        if wakes:
            link.timer = self._loop.call_at(max(min(wakes), now), self._pump, link)

    def _transmit(self, link: _Link, packet: Packet[Any], *, to_host: bool) -> None:
        faults, now = self._faults, self._loop.time()
        self._packets += 1
        number = self._packets
        cut = (
            faults.cut_s > 0
            and (now + uniform(faults.seed, 0) * faults.cut_every_s) % faults.cut_every_s < faults.cut_s
        )
        if cut or uniform(faults.seed, 1, number) < faults.loss:
            self._injections.rows[ROW] += 1
            return
        copies = 1 + (uniform(faults.seed, 2, number) < faults.double)
        self._injections.rows[ROW] += copies - 1
        for copy in range(copies):
            delay_s = faults.delay_s * (0.1 + 2.0 * uniform(faults.seed, 3, number, copy) ** 3)
            self._loop.call_later(delay_s, self._arrive, link, packet, to_host)

    def _arrive(self, link: _Link, packet: Packet[Any], to_host: bool) -> None:
        if self._links.get(link.worker) is not link:
            return
        now = self._loop.time()
        if to_host:
            commands = link.host.receive(packet, now)
            if commands:
                self._inner.post(link.worker, commands)
        else:
            events = link.controller.receive(packet, now)
            if events:
                self._tell().events(link.worker, events)
        self._pump(link)

    def _drop(self, worker: WorkerId) -> None:
        link = self._links.pop(worker, None)
        if link is not None and link.timer is not None:
            link.timer.cancel()

    def _tell(self) -> Listener:
        if self._listener is None:
            raise InvariantBroken("spawn before listen: the worker's events would be lost")
        return self._listener


def _endpoint(faults: LinkFaults, now: float) -> Endpoint[Any, Any]:
    return Endpoint(resend_s=faults.resend_s, silent_s=faults.silent_s, now=now)
