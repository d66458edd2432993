"""Room for the ranks of a `Cluster`: one placement group, one bundle per rank, on one node or many.

All ranks are reserved at once or none, so that two clusters cannot wait for each other with half of theirs each. The
group is removed by `Cluster.close`; that of a process that was killed, by the controller (`release_ranks`), or it ends
with the run.
"""

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple

import ray
from msgspec.structs import replace
from ray.util.placement_group import PlacementGroup, get_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rollart.distributed.ray_placement import LEAST_CPUS, LOOK_S, RANKS, RESERVE_S, read_nodes
from rollart.policy.placement import PlaceRanks, Wait, decide_ranks, emptied, inventory
from rollart.types.errors import RequestError
from rollart.types.placement import ACCELERATOR, Labels, Needs

logger = logging.getLogger(__name__)

Strategy = Literal["PACK", "SPREAD"]


class NodeOfRank(NamedTuple):
    """Where a rank runs."""

    id: str
    address: str
    pid: int

    def __str__(self) -> str:
        return f"{self.address} {self.id[:6]}, pid {self.pid}"


class RankPlaces(NamedTuple):
    """Reserved room: a bundle for each rank."""

    group: PlacementGroup
    needs: Needs
    labels: list[Labels]
    """What the node of each rank was chosen by."""
    why: str
    """Why some are not of the preferred kind; empty if all are."""

    def rooms(self, resource: str = "") -> "list[RankRoom]":
        """Room of each rank; `resource` is the hardware class of those whose node was not chosen by its accelerator."""
        return [
            RankRoom(self._options(index), self, labels.get(ACCELERATOR, resource))
            for index, labels in enumerate(self.labels)
        ]

    def _options(self, index: int) -> dict[str, Any]:
        return {
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=index),
            "num_cpus": max(self.needs.cpus, LEAST_CPUS),
            "num_gpus": self.needs.gpus,
            "memory": self.needs.memory_bytes or None,
        }


class RankRoom(NamedTuple):
    """Where one rank goes."""

    options: dict[str, Any]
    """Options of the actor of this rank."""
    places: RankPlaces | None
    """What it has reserved, with other ranks."""
    resource: str
    """Hardware class; empty if none was asked for."""


def release_rooms(rooms: Sequence[RankRoom]) -> None:
    groups = {room.places.group.id: room.places.group for room in rooms if room.places is not None}
    for group in groups.values():
        remove_placement_group(group)


def reserve_ranks(
    name: str, needs: Needs, ranks: int, strategy: Strategy, place_s: float, prefer_s: float = 0.0
) -> RankPlaces:
    """Reserve room for all ranks, waiting until there is some; the reason of a wait is logged.

    For `prefer_s` it does not fall back from a kind of node that exists and is only full: ranks that have just ended
    may still hold their room.
    """
    now = time.monotonic()
    deadline, prefers_until = now + place_s, now + prefer_s
    preferred = replace(needs, fallback=())
    said = ""
    while True:
        nodes = read_nodes()
        found = decide_ranks(needs, ranks, nodes)
        if time.monotonic() < prefers_until and isinstance(decide_ranks(preferred, ranks, emptied(nodes)), PlaceRanks):
            found = decide_ranks(preferred, ranks, nodes)
        if isinstance(found, PlaceRanks):
            places = _reserve(name, needs, found, strategy)
            if places is not None:
                if found.why:
                    logger.warning("some ranks of %s are not on their preferred kind of node: %s", name, found.why)
                return places
            found = Wait(f"{needs.pool or 'the cluster'} full: {ranks} ranks need {needs} each")
        if found.why != said:
            said = found.why
            logger.warning("the ranks of %s wait for nodes: %s", name, said)
        if time.monotonic() > deadline:
            raise RequestError(
                f"the ranks of {name} found no nodes within {place_s:g} s: {said}; the cluster has {inventory(nodes)}"
            )
        time.sleep(LOOK_S)


def release_ranks(name: str) -> None:
    """Give back the room of ranks whose process did not."""
    if ray.is_initialized():
        with suppress(ValueError):  # there is none
            remove_placement_group(get_placement_group(name + RANKS))


def _reserve(name: str, needs: Needs, place: PlaceRanks, strategy: Strategy) -> RankPlaces | None:
    bundle = needs.resources | {"CPU": max(needs.cpus, LEAST_CPUS)}
    group = placement_group(
        [bundle] * len(place.labels),
        strategy=strategy,
        name=name + RANKS,  # alone, so that it can be found by name
        bundle_label_selector=place.labels if any(place.labels) else None,
    )
    if group.wait(RESERVE_S):
        return RankPlaces(group, needs, place.labels, place.why)
    remove_placement_group(group)
    return None
