"""A controller with a weight store and a process on every node: carries out what is written to its standard input.

    publish NODE STEP | read NODE STEP | forget NODE | quit

`forget` says that the node was switched off. Nodes are numbers of the network's nodes; every command is answered with
a line.
"""

import sys
import time

import ray
from nodes import CLUSTER, SUBNETS
from weight_nodes import result, user

from rollart.distributed.ray_cluster import RayCluster
from rollart.distributed.ray_weights import ray_weights
from rollart.types.errors import WeightError
from rollart.types.versions import Version

NOTICED_S = 120.0


def main(address):
    with RayCluster(address), ray_weights("nodes", slot_bytes=1 << 16) as store:
        users, nodes, dead = {}, {}, set()
        say("ready")
        for line in sys.stdin:
            command, *numbers = line.split()
            if command == "quit":
                return
            node, *steps = map(int, numbers)
            if command == "forget":
                users.pop(node, None)
                dead.add(nodes[node])
                say("forgotten")
                continue
            if node not in users:
                nodes[node] = node_at(f"{SUBNETS[CLUSTER]}.{node + 1}", dead)
                users[node] = user(store, nodes[node])
            try:
                done = result(getattr(users[node], command).remote(Version(0, *steps)))
                say(command, sum(map(sum, done)) if done else "done")
            except WeightError as error:
                say("failed", *str(error).split())


def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def node_at(address, dead):
    """The node at an address. One that was switched off stays in Ray's list until its death is noticed, and one that
    was switched on again may enter the list after `ray start` has returned."""
    until = time.monotonic() + NOTICED_S
    while True:
        for node in ray.nodes():
            if node["Alive"] and node["NodeManagerAddress"] == address and node["NodeID"] not in dead:
                return node["NodeID"]
        if time.monotonic() > until:
            raise TimeoutError(f"no node is alive at {address}")
        time.sleep(0.2)


if __name__ == "__main__":
    main(sys.argv[1])
