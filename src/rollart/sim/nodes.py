"""Modelled nodes: room for engines and the trainer, which joins, drains and dies.

A node offers room in units of one engine, under the name of a GPU, to the workers of its pool.
"""

from collections.abc import Callable, Sequence

import msgspec

from rollart.policy.placement import Place, Wait, decide
from rollart.sim.scenario import NodeModel
from rollart.types.ids import WorkerId
from rollart.types.placement import ACCELERATOR, Needs, Node


def needs_of(pool: str) -> Needs:
    """What a worker of a pool needs of its node."""
    return Needs(gpus=1, labels={ACCELERATOR: pool}, pool=pool)


class SimNodes:
    """Simulated nodes and the workers placed on them. Nodes join, drain and die by timers."""

    def __init__(
        self,
        models: Sequence[NodeModel],
        call_at: Callable[..., object],
        drained: Callable[[list[WorkerId]], None],
        lost: Callable[[list[WorkerId]], None],
    ) -> None:
        """`drained` and `lost` are called with the workers of a node that drains or is gone. When a node joins,
        `drained` is called without workers."""
        self._nodes: dict[str, Node] = {}
        self._taken: dict[WorkerId, str] = {}
        self._drained, self._lost = drained, lost
        for number, model in enumerate(models):
            node = Node(f"n{number}", "", {ACCELERATOR: model.pool}, {"GPU": float(model.engines)}, {})
            node = msgspec.structs.replace(node, free=dict(node.total))
            if model.from_s:
                call_at(model.from_s, self._join, node)
            else:
                self._nodes[node.id] = node
            if model.until_s is not None:
                if model.notice_s:
                    call_at(max(0.0, model.until_s - model.notice_s), self._drain, node.id)
                call_at(model.until_s, self._lose, node.id)

    def now(self) -> list[Node]:
        """The nodes, and their room."""
        return list(self._nodes.values())

    def take(self, worker: WorkerId, needs: Needs) -> Node | Wait:
        """Room for a worker; a `Wait` if there is none."""
        found = decide(needs, self.now())
        if not isinstance(found, Place):
            return found
        node = next(
            node
            for node in self.now()
            if not node.draining and node.labels == found.labels and node.free["GPU"] >= needs.gpus
        )
        node.free["GPU"] -= needs.gpus
        self._taken[worker] = node.id
        return node

    def give_back(self, worker: WorkerId, needs: Needs) -> None:
        node = self._nodes.get(self._taken.pop(worker, ""))
        if node is not None:
            node.free["GPU"] += needs.gpus

    def _join(self, node: Node) -> None:
        self._nodes[node.id] = node
        self._drained([])

    def _drain(self, id: str) -> None:
        if id in self._nodes:
            self._nodes[id] = msgspec.structs.replace(self._nodes[id], draining=True)
            self._drained(self._on(id))

    def _lose(self, id: str) -> None:
        if self._nodes.pop(id, None) is not None:
            self._lost(self._on(id))

    def _on(self, id: str) -> list[WorkerId]:
        return [worker for worker, node in self._taken.items() if node == id]
