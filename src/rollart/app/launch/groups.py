"""The machines that a run needs: one group of alike nodes per pool.

Every worker reserves what its pool says (`compose.first_workers`). Workers are packed on as few nodes as the size of a
node allows; then all nodes of a group get what the fullest of them needs. Workers without a pool have a group of their
own. The head of the cluster is none of these nodes: it has the controller, and reserves nothing.

    pool H800: 3 engines of 4 GPUs and 1 CPU     with --gpus-per-node 8      2 nodes with 8 GPUs and 3 CPUs
    trainer: 2 ranks of 1 CPU in pool cpus                                   1 node with 3 CPUs
"""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from rollart.app.compose import first_workers, labels_of
from rollart.config.schema import RunConfig
from rollart.types.errors import RequestError
from rollart.types.placement import Labels, Needs, Node

OTHERS = "others"
"""Group of the workers without a pool."""
GPUS, CPUS = 8, 32
"""Usual size of a machine."""
SPARE_CPUS = 1
"""For Ray and for the holder of weights, on every node."""


class NodeSize(NamedTuple):
    """What a machine has at most."""

    gpus: int
    cpus: int


class NodeGroup(msgspec.Struct, frozen=True):
    """Alike nodes."""

    name: str
    nodes: int
    cpus: int
    gpus: int
    memory_bytes: int
    """What workers reserve; 0 if they do not say."""
    labels: Labels


class _Bin:
    """A node that is being filled."""

    def __init__(self) -> None:
        self.gpus, self.cpus, self.memory_bytes = 0.0, 0.0, 0

    def fits(self, needs: Needs, size: NodeSize) -> bool:
        return self.gpus + needs.gpus <= size.gpus and self.cpus + needs.cpus <= size.cpus - SPARE_CPUS

    def add(self, needs: Needs) -> None:
        self.gpus += needs.gpus
        self.cpus += needs.cpus
        self.memory_bytes += needs.memory_bytes


def node_groups(config: RunConfig, size: NodeSize) -> list[NodeGroup]:
    """Groups in the order of the config's pools."""
    asked: dict[str, list[Needs]] = {name: [] for name in config.pools}
    for spec in first_workers(config):
        asked.setdefault(spec.needs.pool or OTHERS, []).extend([spec.needs] * spec.ranks)
    return [
        _group(name, needs, labels_of(config.pools[name]) if name in config.pools else {}, size)
        for name, needs in asked.items()
        if needs
    ]


def _group(name: str, asked: Sequence[Needs], labels: Labels, size: NodeSize) -> NodeGroup:
    bins: list[_Bin] = []
    for needs in sorted(asked, key=lambda needs: -needs.gpus):  # workers without GPUs fill the gaps
        if not _Bin().fits(needs, size):
            raise RequestError(
                f"a worker of pool {name} needs {needs}, more than a node has ({size.gpus} GPUs and {size.cpus} CPUs, "
                f"{SPARE_CPUS} of them for Ray); set --gpus-per-node and --cpus-per-node"
            )
        found = next((each for each in bins if each.fits(needs, size)), None)
        if found is None:
            found = _Bin()
            bins.append(found)
        found.add(needs)
    return NodeGroup(
        name,
        len(bins),
        math.ceil(max(each.cpus for each in bins)) + SPARE_CPUS,
        math.ceil(max(each.gpus for each in bins)),
        max(each.memory_bytes for each in bins),
        labels,
    )


def as_nodes(groups: Sequence[NodeGroup]) -> list[Node]:
    """The nodes as Ray will show them, to try a placement on."""
    return [
        Node(f"{group.name}-{number}", "", group.labels, total, total)
        for group in groups
        for number in range(group.nodes)
        for total in [_resources(group)]
    ]


def _resources(group: NodeGroup) -> dict[str, float]:
    memory = {"memory": float(group.memory_bytes)} if group.memory_bytes else {}
    return {"CPU": float(group.cpus), **({"GPU": float(group.gpus)} if group.gpus else {}), **memory}


def dns_name(name: str) -> str:
    """A name that Kubernetes and Slurm accept.

    >>> dns_name("H800 (Nord)"), dns_name("__")
    ('h800-nord', 'run')
    """
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40].strip("-") or "run"
