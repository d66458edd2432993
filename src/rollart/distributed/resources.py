"""ResourceManager: pools of devices by hardware class, and which rank of which `Cluster` has which of them.

    ResourceManager({"H800": 2}, {"H20": 4})
      Cluster(Trainer,   2, resources=manager, role="train")                     H800, H800
      Cluster(Generator, {"H20": 3, "H800": 1}, …, role="generation")            H20 × 3; H800 is full: H20
      Cluster(Judge,     1, …, role="reward")                                    local: on the caller's node

A class is the label `ray.io/accelerator-type` of nodes. A rank of a class takes one of its devices: it reserves a GPU
on such a node, or what `needs` says for the class. Two classes are not counted: `CPU`, a CPU of any node, and `local`.

Invariants:
- A class never has more ranks bound than it has devices.
- A rank falls back to another class of the manager, in their order, if its own is full or has no node with room; the
  reason is recorded in its binding. If no class has a device left, the request is refused at once, with what is bound.
- `Cluster.close` gives devices back. A rank that is lost keeps its device until then.
"""

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rollart.distributed.rank_placement import RankRoom, Strategy, release_rooms, reserve_ranks
from rollart.types.errors import RequestError
from rollart.types.placement import ACCELERATOR, Needs

logger = logging.getLogger(__name__)

CPU, LOCAL = "CPU", "local"
ROLES = {"train": "H800", "generation": "H20", "environment": CPU, "reward": LOCAL}
"""Hardware class of the ranks of a role, unless the cluster asks for others."""


ENDING_S = 10.0
"""Time for which Ray may still account for the devices of ranks that have ended."""


class Binding(NamedTuple):
    """A rank and its device."""

    cluster: str
    rank: int
    wanted: str
    resource: str
    """Class that it has."""
    why: str
    """Reason if the class is not the wanted one; empty if it is."""


class Bound(NamedTuple):
    """What a cluster gets for one rank."""

    binding: Binding
    room: RankRoom


class ResourceManager:
    """Thread-safe. One per program, which is connected to the cluster."""

    def __init__(self, *pools: Mapping[str, int], needs: Mapping[str, Needs] | None = None) -> None:
        """Devices by class; `needs`: what one rank of a class reserves, instead of a GPU with its label."""
        self._devices: dict[str, int] = {}
        for pool in pools:
            for name, devices in pool.items():
                if name in (CPU, LOCAL) or devices < 1:
                    raise RequestError(f"ResourceManager: {name!r}: {devices} is not a class with devices to count")
                self._devices[name] = self._devices.get(name, 0) + devices
        self._needs = dict(needs or {})
        self._lock = threading.Lock()
        self._one_at_a_time = threading.Lock()
        self._bindings: list[Binding] = []

    @property
    def bindings(self) -> tuple[Binding, ...]:
        """Bindings of all open clusters."""
        with self._lock:
            return tuple(self._bindings)

    def free(self, name: str) -> int:
        """Devices of a class that no rank has."""
        with self._lock:
            return self._free(name)

    def bind(
        self, cluster: str, role: str, ranks: int | Mapping[str, int], first: int, strategy: Strategy, place_s: float
    ) -> list[Bound]:
        """Devices for the ranks of a cluster, numbered from `first`; all or none."""
        wanted = self._wanted(cluster, role, ranks)
        bound: list[Bound] = []
        with self._one_at_a_time:  # between the count of what is free and the record of what is taken
            try:
                for name, count in wanted.items():
                    bound += self._bind_class(cluster, name, count, first + len(bound), strategy, place_s)
            except BaseException:
                self.release([each.binding for each in bound])
                release_rooms([each.room for each in bound])
                raise
        return bound

    def release(self, bindings: Sequence[Binding]) -> None:
        """Give back devices."""
        with self._lock:
            for binding in bindings:
                self._bindings.remove(binding)

    def _wanted(self, cluster: str, role: str, ranks: int | Mapping[str, int]) -> dict[str, int]:
        if not isinstance(ranks, int):
            return {name: count for name, count in ranks.items() if count}
        if role not in ROLES:
            raise RequestError(f"{cluster}: there is no role {role!r}; roles are {', '.join(ROLES)}")
        return {ROLES[role]: ranks}

    def _bind_class(
        self, cluster: str, wanted: str, count: int, first: int, strategy: Strategy, place_s: float
    ) -> list[Bound]:
        if wanted == LOCAL:
            here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
            rooms = [RankRoom({"scheduling_strategy": here, "num_cpus": 0}, None, LOCAL)] * count
            return self._record(cluster, wanted, first, [(room, "") for room in rooms])
        if wanted == CPU:
            rooms = reserve_ranks(cluster, Needs(cpus=1, pool=CPU), count, strategy, place_s).rooms(CPU)
            return self._record(cluster, wanted, first, [(room, "") for room in rooms])
        bound: list[Bound] = []
        for name, number in self._planned(cluster, wanted, count).items():
            needs = self._needs_of(name, number)
            places = reserve_ranks(f"{cluster} {name}", needs, number, strategy, place_s, prefer_s=ENDING_S)
            full = "" if name == wanted else f"{wanted} {'full' if wanted in self._devices else 'missing'}"
            found = [(room, full or ("" if room.resource == name else places.why)) for room in places.rooms(name)]
            bound += self._record(cluster, wanted, first + len(bound), found)
        return bound

    def _planned(self, cluster: str, wanted: str, count: int) -> dict[str, int]:
        """How many ranks each class takes: the wanted one first, then the others in their order."""
        planned: dict[str, int] = {}
        left = count
        with self._lock:
            for name in dict.fromkeys((wanted, *self._devices)):
                taken = min(left, self._free(name))
                if taken:
                    planned[name] = taken
                left -= taken
            there = ", ".join(f"{self._free(name)} of {total} {name}" for name, total in self._devices.items())
        if left:
            raise RequestError(
                f"{cluster}: {count} ranks on {wanted} need more devices than are free: {there or 'none'}"
            )
        return planned

    def _needs_of(self, name: str, number: int) -> Needs:
        """What a rank reserves; other classes with as many free devices will do while this one has no node."""
        with self._lock:
            others = [other for other in self._devices if other != name and self._free(other) >= number]
        needs = self._needs.get(name, Needs(gpus=1))
        labels = {**needs.labels, ACCELERATOR: name}
        fallback = tuple({**labels, ACCELERATOR: other} for other in others)
        return Needs(needs.gpus, needs.cpus, needs.memory_bytes, labels, fallback, name)

    def _record(self, cluster: str, wanted: str, first: int, found: Sequence[tuple[RankRoom, str]]) -> list[Bound]:
        bound = [
            Bound(Binding(cluster, first + index, wanted, room.resource, why), room)
            for index, (room, why) in enumerate(found)
        ]
        with self._lock:
            self._bindings += [each.binding for each in bound]
        for binding, _ in bound:
            if binding.why:
                logger.warning("rank %d of %s is on %s: %s", binding.rank, cluster, binding.resource, binding.why)
        return bound

    def _free(self, name: str) -> int:
        return self._devices.get(name, 0) - sum(each.resource == name for each in self._bindings)
