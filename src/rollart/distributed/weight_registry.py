"""The registry of weight versions: which exist, and which nodes have them. One Ray actor beside the controller.

    begin(manifest) ──► a draft on the publisher's node ──► all other holders begin to fetch it
    commit(version) ──► visible; holders that have fetched it make it visible on their nodes

It starts the holder of a node when that node first needs one, and owns it: holders outlive trainers and engines, and
end with the registry, which ends with the controller.

Invariants: versions only grow; a version is visible, with its dependency, from its commit until it is dropped or no
node has it any more; a node that dies takes only its own copies with it; a draft that was not committed ends with the
next one.
"""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rollart.distributed.handshake import Credentials
from rollart.distributed.link import Address
from rollart.distributed.ray_calls import answered
from rollart.distributed.weight_holder import HOLDER, HolderOrder
from rollart.ports.weight_rules import check_dependency, check_newer, check_not_needed, not_held, with_dependents
from rollart.types.errors import WeightError
from rollart.types.versions import Version
from rollart.types.weights import Manifest

logger = logging.getLogger(__name__)

NAMESPACE = "rollart"
PING_S = 10.0
TELL_S = 10.0
"""Timeout of best-effort calls to holders, which may be dead."""
LOOK_S = 1.0


class Place(NamedTuple):
    """The holder of a node."""

    holder: ActorHandle
    store: bytes
    """Its store, pickled: only processes of that node can attach to it."""
    address: Address
    name: str
    node: str


class Opened(NamedTuple):
    """Where the buckets of a version that is being published go."""

    node: str
    holder: str
    """Name of its holder."""
    slot: int
    address: Address
    credentials: Credentials
    manifest: bytes


class _Known(NamedTuple):
    data: bytes
    """The manifest as JSON."""
    depends_on: Version | None
    nodes: list[str]
    """Nodes that have the version."""


class _Draft(NamedTuple):
    manifest: Manifest
    opened: Opened
    committed: "asyncio.Future[bool]"


class Registry:
    """The registry of one run, as an asyncio actor: between two awaits its state does not change."""

    def __init__(self, run: str, factory: str, settings: Mapping[str, Any]) -> None:
        self._run = run
        self._factory = factory
        self._settings = dict(settings)
        self._credentials = Credentials.new()
        self._places: dict[str, Place] = {}
        self._starting: dict[str, asyncio.Task[Place]] = {}
        self._watching: set[asyncio.Task[None]] = set()
        self._started = 0
        self._versions: dict[Version, _Known] = {}
        self._drafts: dict[Version, _Draft] = {}
        self._fence: Version | None = None
        """Newest version ever published."""
        self._closed = False

    # --- reading

    async def newest(self) -> Version | None:
        return max(self._versions, default=None)

    async def manifest(self, version: Version) -> bytes:
        return self._known(version).data

    async def sources(self, version: Version) -> tuple[bytes, list[Address]]:
        """Manifest of a version, and where to fetch it: also of one that is being published."""
        draft = self._drafts.get(version)
        if draft is not None:
            return draft.opened.manifest, [draft.opened.address]
        known = self._known(version)
        return known.data, [self._places[node].address for node in known.nodes]

    async def committed(self, version: Version) -> bool:
        """Whether the version is visible, once its publication has ended."""
        draft = self._drafts.get(version)
        if draft is not None:
            await asyncio.shield(draft.committed)
        return version in self._versions

    async def arrived(self, version: Version, node: str) -> bool:
        """A node has a version now; False if it should drop it again."""
        known = self._versions.get(version)
        if known is None or node not in self._places:
            return False
        if node not in known.nodes:
            known.nodes.append(node)
        return True

    async def evicted(self, node: str, versions: set[Version]) -> None:
        """A node has these versions no longer."""
        self._forget(node, versions)

    async def nodes_of(self, version: Version) -> list[str]:
        """Ids of the nodes that have a version."""
        return list(self._known(version).nodes)

    # --- publishing

    async def begin(self, data: bytes, node: str) -> Opened:
        """Begin to publish a version from a node; other holders begin to fetch it."""
        manifest = msgspec.json.decode(data, type=Manifest)
        version = manifest.version
        self._check(manifest)
        for old in [other for other in self._drafts if other <= version]:
            await self.abort(old)
        place, (slot, evicted) = await self._begin_on(node, data)
        self._forget(node, evicted)
        opened = Opened(node, place.name, slot, place.address, self._credentials, data)
        self._drafts[version] = _Draft(manifest, opened, asyncio.get_running_loop().create_future())
        for other in list(self._places.values()):
            if other.node != node:
                other.holder.prefetch.remote(version)
        return opened

    async def opened(self, version: Version) -> Opened:
        return self._draft(version).opened

    async def commit(self, version: Version, wait_s: float) -> None:
        """Make a version visible, once its buckets are all there."""
        draft = self._draft(version)
        node = draft.opened.node
        try:
            self._check(draft.manifest)
            await answered(self._places[node].holder.commit.remote(version, wait_s))
        except RayActorError as error:
            raise WeightError(
                f"{version} was not published: the holder of node {node[:8]} died. Publish again."
            ) from error
        except WeightError:
            await self.abort(version)
            raise
        if self._drafts.get(version) is not draft:  # meanwhile the holder died, or a successor ended it
            if node in self._places:
                self._places[node].holder.drop.remote(version)
            raise WeightError(f"{version} was not published: its publication was ended meanwhile. Publish again.")
        del self._drafts[version]
        self._fence = version
        self._versions[version] = _Known(draft.opened.manifest, draft.manifest.depends_on, [node])
        draft.committed.set_result(True)

    async def abort(self, version: Version) -> None:
        """End a publication; nothing is published. Unknown ones are ignored."""
        draft = self._drafts.pop(version, None)
        if draft is None:
            return
        draft.committed.set_result(False)
        place = self._places.get(draft.opened.node)
        if place is not None:
            await self._tell([place.holder.discard.remote(version)], f"to discard {version}")

    async def drop(self, version: Version) -> None:
        if version not in self._versions:
            return
        check_not_needed(version, {other: known.depends_on for other, known in self._versions.items()})
        del self._versions[version]
        await self._tell([place.holder.drop.remote(version) for place in self._places.values()], f"to drop {version}")

    # --- holders

    async def place(self, node: str, broken: str = "") -> Place:
        """The holder of a node, started if there is none. `broken` is the name of one that did not answer."""
        found = self._places.get(node)
        if found is not None and found.name == broken and not await self._alive(found):
            self._lost(found)
            found = None
        if found is not None:
            return found
        if node not in self._starting:
            self._starting[node] = asyncio.get_running_loop().create_task(self._start(node))
        return await asyncio.shield(self._starting[node])

    async def release(self, node: str) -> None:
        """End the holder of a node that leaves and that nothing reads from any more; other nodes keep its versions."""
        place = self._places.get(node)
        if place is None or any(draft.opened.node == node for draft in self._drafts.values()):
            return
        only_there = [version for version, known in self._versions.items() if known.nodes == [node]]
        if only_there:
            others = [other for other in self._places.values() if other.node != node]
            keeper = others[0] if others else await self.place(ray.get_runtime_context().get_node_id())
            for version in sorted(only_there):
                await answered(keeper.holder.pull.remote(version))
        await self._tell([place.holder.close.remote()], "to close")
        ray.kill(place.holder)
        self._lost(place)

    async def close(self) -> None:
        """End all holders."""
        self._closed = True
        await self._tell([place.holder.close.remote() for place in self._places.values()], "to close")
        for place in self._places.values():
            ray.kill(place.holder)

    async def _tell(self, calls: list[Any], what: str) -> None:
        """Wait for calls of holders, whether or not they are alive."""
        try:
            await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), TELL_S)
        except TimeoutError:
            logger.warning("not every holder of weights answered within %g s when it was told %s", TELL_S, what)

    async def _start(self, node: str) -> Place:
        try:
            if self._closed:
                raise WeightError("the weight store is closed")
            self._started += 1
            name = f"{self._run}-{node[:12]}-{self._started}"
            order = HolderOrder(node, name, self._factory, self._settings, self._credentials)
            holder = HOLDER.options(
                name=name, namespace=NAMESPACE, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
            ).remote(order, ray.get_runtime_context().current_actor)
            store, address = await answered(holder.place.remote())
        except RayError as error:
            raise WeightError(f"node {node[:8]} has no holder of weights: {error}") from error
        finally:
            del self._starting[node]
        place = self._places[node] = Place(holder, store, address, name, node)
        watching = asyncio.get_running_loop().create_task(self._watch(place))
        self._watching.add(watching)
        watching.add_done_callback(self._watching.discard)
        return place

    async def _watch(self, place: Place) -> None:
        """Notice the death of a holder."""
        while True:
            try:
                await place.holder.wait.remote()
            except ActorUnavailableError:  # a cut of the network: it may come back
                await asyncio.sleep(LOOK_S)
                continue
            except RayActorError:
                self._lost(place)
            return

    async def _alive(self, place: Place) -> bool:
        try:
            await asyncio.wait_for(place.holder.ping.remote(), PING_S)
        except ActorUnavailableError:
            return True
        except RayActorError:
            return False
        except TimeoutError:
            return True
        return True

    async def _begin_on(self, node: str, data: bytes) -> tuple[Place, tuple[int, set[Version]]]:
        place = await self.place(node)
        try:
            return place, await answered(place.holder.begin.remote(data))
        except RayActorError:  # it died unnoticed
            place = await self.place(node, broken=place.name)
        try:
            return place, await answered(place.holder.begin.remote(data))
        except RayActorError as error:
            raise WeightError(f"nothing was published: the holder of node {node[:8]} died. Publish again.") from error

    def _lost(self, place: Place) -> None:
        """A holder died, and its copies with it."""
        if self._places.get(place.node) is not place:
            return
        del self._places[place.node]
        for version, draft in list(self._drafts.items()):
            if draft.opened.node == place.node:
                del self._drafts[version]
                draft.committed.set_result(False)
        self._forget(place.node, set(self._versions))

    def _forget(self, node: str, versions: set[Version]) -> None:
        """Forget copies of a node; a version without any copy is gone, and with it what depends on it."""
        for version in sorted(versions & self._versions.keys()):
            known = self._versions.get(version)
            if known is None or node not in known.nodes:
                continue
            known.nodes.remove(node)
            if not known.nodes:
                dependencies = {other: each.depends_on for other, each in self._versions.items()}
                for gone in with_dependents(version, dependencies):
                    del self._versions[gone]

    def _check(self, manifest: Manifest) -> None:
        check_newer(manifest.version, self._fence)
        check_dependency(manifest, self._versions)

    def _known(self, version: Version) -> _Known:
        known = self._versions.get(version)
        if known is None:
            raise not_held(version, self._versions)
        return known

    def _draft(self, version: Version) -> _Draft:
        draft = self._drafts.get(version)
        if draft is None:
            raise WeightError(
                f"{version} is not being published: its publication was ended, by a newer one or with its node. "
                "Publish again."
            )
        return draft


REGISTRY = ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0)(Registry)
