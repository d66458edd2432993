"""Nodes of a Ray cluster, and placement groups for workers.

One worker is one placement group of one bundle, so all that it reserves is on one node. The group is named after the
worker, and after the reason if the node is not of the preferred kind: `rollart cluster show` reads it there.

Ray calls block, forever once Ray is gone, so they run in threads that are never joined.
"""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

import ray
import ray._private.state as ray_state
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rollart.policy.placement import Place, Wait, decide
from rollart.types.ids import WorkerId
from rollart.types.placement import Needs, Node

T = TypeVar("T")

LOOK_S = 0.5
RESERVE_S = 5.0
"""How long a group may take although a node has room; then another worker was faster, or the node is gone."""
LEAST_CPUS = 0.001
"""A bundle cannot be empty."""
RANKS = " ranks"
"""Suffix of the name of a group that has a bundle for each rank of a worker but the first."""
REASON = "  "
"""Between worker and reason in the name of a group."""


class Reserved(NamedTuple):
    """Room for a worker."""

    group: PlacementGroup
    node: Node
    why: str

    def options(self, needs: Needs) -> dict[str, Any]:
        """Options of an actor that takes all of it."""
        return {
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=0),
            "num_cpus": max(needs.cpus, LEAST_CPUS),
            "num_gpus": needs.gpus,
            "memory": needs.memory_bytes or None,
        }


class WorkerOnNode(NamedTuple):
    worker: str
    node: str
    """Id of the node; empty while it waits."""
    why: str


async def reserve(
    worker: WorkerId, needs: Needs, waits: Callable[[str], None], *, last: str = "", failures: int = 0
) -> Reserved:
    """Reserve room for a worker, waiting until there is some; `waits` is called with the reason meanwhile."""
    said = ""
    while True:
        found: Place | Wait
        try:
            nodes = await in_thread(read_nodes)
            found = decide(needs, nodes, last=last, failures=failures)
            if isinstance(found, Place):
                reserved = await in_thread(partial(_reserve, worker, needs, found, nodes))
                if reserved is not None:
                    return reserved
                found = Wait(f"{needs.pool or 'the cluster'} full: needs {needs}")
        except RayError as error:  # such as a cut of the network; if Ray is lost, the run ends anyway
            found = Wait(f"the cluster does not answer: {error}")
        if found.why != said:
            said = found.why
            waits(said)
        await asyncio.sleep(LOOK_S)


def release(reserved: Reserved) -> None:
    """Give the room back, without waiting for Ray."""
    threading.Thread(target=remove_placement_group, args=(reserved.group,), daemon=True).start()


def read_nodes() -> list[Node]:
    """Living nodes of the cluster that this process is connected to."""
    free: dict[str, dict[str, float]] = ray_state.available_resources_per_node()
    draining = ray_state.state.get_draining_nodes()
    return [
        Node(
            entry["NodeID"],
            entry["NodeManagerAddress"],
            dict(entry["Labels"]),
            dict(entry["Resources"]),
            dict(free.get(entry["NodeID"], {})),
            entry["NodeID"] in draining,
        )
        for entry in ray.nodes()
        if entry["Alive"]
    ]


def read_workers() -> list[WorkerOnNode]:
    """Workers of all runs on the cluster, and their nodes."""
    found = []
    for group in placement_group_table().values():
        if group["state"] == "REMOVED" or not group["name"]:
            continue
        worker, _, why = group["name"].partition(REASON)
        nodes = group["bundles_to_node_id"]
        for index in group["bundles"]:
            name = f"{worker.removesuffix(RANKS)} rank {index + 1}" if worker.endswith(RANKS) else worker
            found.append(WorkerOnNode(name, nodes.get(index, ""), why))
    return sorted(found)


def _reserve(worker: WorkerId, needs: Needs, place: Place, nodes: list[Node]) -> Reserved | None:
    group = placement_group(
        [needs.resources | {"CPU": max(needs.cpus, LEAST_CPUS)}],
        strategy="STRICT_PACK",
        name=worker + (REASON + place.why if place.why else ""),
        bundle_label_selector=[place.labels] if place.labels else None,
        _soft_target_node_id=place.node or None,
    )
    if group.wait(RESERVE_S):
        id = placement_group_table(group)["bundles_to_node_id"][0]
        node = next((node for node in nodes if node.id == id), None)
        if node is not None:
            return Reserved(group, node, place.why)
    remove_placement_group(group)
    return None


async def in_thread(call: Callable[[], T]) -> T:
    """The result of a call in a thread of its own, which does not keep this process alive."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)  # type: ignore[arg-type]
        else:
            future.set_exception(error)

    def run() -> None:
        result, failure = None, None
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001 - it is raised by the caller
            failure = error
        with suppress(RuntimeError):  # the loop is closed: the run is over
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name="ray call", daemon=True).start()
    return await future
