"""Runtimes that break one promise each."""

from collections.abc import Mapping, Sequence
from typing import Any

from rollart.ports.runtime import Listener
from rollart.sim.runtime import VirtualRuntime
from rollart.types.errors import RuntimeLost
from rollart.types.ids import WorkerId
from rollart.types.messages import Role, WorkerEvent, WorkerInfo
from rollart.types.placement import NOTHING, Needs, Node


class Filter:
    """A listener in front of another; passes everything on."""

    def __init__(self, listener: Listener) -> None:
        self.listener = listener

    def waits(self, worker: WorkerId, why: str) -> None:
        self.listener.waits(worker, why)

    def placed(self, worker: WorkerId, node: str, why: str) -> None:
        self.listener.placed(worker, node, why)

    def leaves(self, worker: WorkerId, why: str) -> None:
        self.listener.leaves(worker, why)

    def nodes_seen(self, nodes: Sequence[Node]) -> None:
        self.listener.nodes_seen(nodes)

    def joined(self, worker: WorkerId, info: WorkerInfo) -> None:
        self.listener.joined(worker, info)

    def events(self, worker: WorkerId, events: Sequence[WorkerEvent]) -> None:
        self.listener.events(worker, events)

    def died(self, worker: WorkerId, reason: str) -> None:
        self.listener.died(worker, reason)

    def failed(self, error: RuntimeLost) -> None:
        self.listener.failed(error)


class KeepsDeathsQuiet(VirtualRuntime):
    """Deaths are not reported."""

    def listen(self, listener: Listener) -> None:
        class Quiet(Filter):
            def died(self, worker: WorkerId, reason: str) -> None:
                pass

        super().listen(Quiet(listener))


class TurnsEventsAround(VirtualRuntime):
    """The events of a batch come last first."""

    def listen(self, listener: Listener) -> None:
        class Reversed(Filter):
            def events(self, worker: WorkerId, events: Sequence[WorkerEvent]) -> None:
                self.listener.events(worker, events[::-1])

        super().listen(Reversed(listener))


class NeverStops(VirtualRuntime):
    """A stopped worker goes on."""

    def stop(self, worker: WorkerId) -> None:
        pass


class IgnoresInterpreter(VirtualRuntime):
    """Takes an interpreter that it has no use for."""

    def spawn(self, *worker: Any, python: str = "", needs: Needs = NOTHING) -> None:  # noqa: ARG002 - that is the fault
        super().spawn(*worker)


class AnswersInside(VirtualRuntime):
    """Builds the worker inside `spawn`, and reports it there."""

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
        super().spawn(worker, role, factory, settings, python=python, needs=needs)
        self._build(self._hosted[worker], factory, settings)
