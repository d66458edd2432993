"""The end of a node without losses: Ray's drain protocol.

    drain, or SIGTERM ──► Ray places nothing new there; controllers notice (`ray_placement.read_nodes`), let workers
                          finish or move ──► the raylet is idle and ends by itself ──► the node is gone

A node that is not idle by its deadline ends anyway, as if it had been killed. Ray itself takes SIGTERM to
`ray_start --block` as a drain; only its deadline is set here. Where SIGTERM reaches a shell instead, as in containers,
this does the same for the nodes of the machine that it runs on, and returns when they are gone:

    python -m rollart.distributed.ray_drain
"""

import os
import sys
import time
from collections.abc import Mapping

import ray._private.ray_constants as ray_constants
from ray._raylet import GcsClient  # type: ignore[attr-defined]  # exists, but in a compiled module
from ray.core.generated.autoscaler_pb2 import DrainNodeReason
from ray.core.generated.gcs_pb2 import GcsNodeInfo

from rollart.distributed import one_interface
from rollart.distributed.node_environment import DRAIN_VARIABLE
from rollart.types.errors import RequestError

DRAIN_S = 120.0
"""Time that a node has to become idle after SIGTERM, unless Ray's own variable for it is set."""
LOOK_S = 0.5


def drain(address: str, node: str, deadline_s: float) -> None:
    """Drain the node with this id, of the cluster whose head has this address."""
    deadline_ms = round((time.time() + deadline_s) * 1000)
    reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    accepted, why = GcsClient(address=address).drain_node(node, reason, "it was asked to leave", deadline_ms)
    if not accepted:
        raise RequestError(f"node {node} cannot be drained: {why}")


def drain_machine(address: str, own_address: str, deadline_s: float) -> int:
    """Drain all nodes of the machine with this address, except the head, and wait until they are gone; their number.

    After the deadline it waits no longer: the raylet then ends by itself.
    """
    client = GcsClient(address=address)
    living = _nodes_of_machine(client, own_address)
    for node in living:
        drain(address, node, deadline_s)
    number, deadline = len(living), time.monotonic() + deadline_s
    while living and time.monotonic() < deadline:
        time.sleep(LOOK_S)  # Ray has nothing to wait on here
        living = [node for node in _nodes_of_machine(client, own_address) if node in living]
    return number


def _nodes_of_machine(client: GcsClient, own_address: str) -> list[str]:
    nodes = client.get_all_node_info().items()
    return sorted(
        id.hex()
        for id, info in nodes
        if info.state == GcsNodeInfo.ALIVE and not info.is_head_node and info.node_manager_address == own_address
    )


def deadline_of(environment: Mapping[str, str]) -> float:
    """Time that the nodes of this machine have to become idle."""
    return float(environment.get(DRAIN_VARIABLE, DRAIN_S))


def set_deadline(*, head: bool) -> None:
    """Set the deadline of a node that this process starts and waits for. Ray has read the environment on its import.

    The head ends at once: a cluster cannot live without it.
    """
    deadline_s = 0.0 if head else deadline_of(os.environ)
    ray_constants.RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S = deadline_s


def _main() -> None:
    address = os.environ.get("RAY_ADDRESS", "")  # KubeRay sets it for every container
    host, _, port = address.rpartition(":")
    if not host:
        sys.exit("rollart: RAY_ADDRESS is not set: give HOST:PORT of the cluster's head")
    own = one_interface.address_towards(host.strip("[]"), int(port))
    drained = drain_machine(address, own, deadline_of(os.environ))
    sys.stderr.write(f"nodes of this machine that drained: {drained}\n")


if __name__ == "__main__":
    _main()
