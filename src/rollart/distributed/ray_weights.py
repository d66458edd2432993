"""A weight store between the nodes of a Ray cluster, which share nothing but the network.

    trainer ──► holder of its node ══ TCP ══► holder of another node ──► engines there
    (copies buckets into shared memory)       (fetches a version once)   (map the same memory)
                     └───────── registry, beside the controller ─────────┘

Ray starts the holders and the registry, notices their deaths and ends them; bytes go between holders (`weight_stream`).
Invariants are those of the port, over all nodes. A killed trainer takes no published version with it; a killed holder
or node takes its own copies, and the next reader or publisher there starts a new holder, which fetches what it needs
from any node that has it. If no node has a version any more, it is gone, and the next one must still be newer.

>>> def train(connection):  # connected to a cluster, `RayCluster` or `LocalRay`
...     with ray_weights("run-7", slot_bytes=2**30) as store:
...         ...  # publish and read here, and in workers that `store` was sent to
"""

import pickle
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Self

import msgspec
import ray
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rollart.distributed import weight_stream
from rollart.distributed.ray_calls import CALL_S, answer
from rollart.distributed.weight_holder import PULL_S, NodeStore
from rollart.distributed.weight_registry import NAMESPACE, REGISTRY, Opened, Place
from rollart.ports.weight_rules import checked_buckets, copy_bucket
from rollart.ports.weights import WeightStore
from rollart.types.errors import LinkError, RequestError, VersionMissing, WeightError
from rollart.types.versions import Version
from rollart.types.weights import Manifest

SHARED_MEMORY = "rollart.backends.stores.shared:SharedMemoryStore.create"
"""Factory path of a node's store."""
CLOSE_S = 15.0


@contextmanager
def ray_weights(
    run: str, *, slot_bytes: int, slots: int = 3, adapter_bytes: int = 0, factory: str = SHARED_MEMORY
) -> Iterator["RayWeightStore"]:
    """A store that ends with the block, at the latest with this process. `run` is unique in the cluster.

    Every node that uses it has `slots` slots of `slot_bytes` in its shared memory, as a `SharedMemoryStore` has.
    """
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", run):
        raise RequestError(f"a weight store is named with letters, digits, '-', '_' and '.', not {run!r}")
    node = ray.get_runtime_context().get_node_id()
    settings = {"slot_bytes": slot_bytes, "slots": slots, "adapter_bytes": adapter_bytes}
    registry = REGISTRY.options(
        name=_registry_name(run),
        namespace=NAMESPACE,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
    ).remote(run, factory, settings)
    try:
        answer(registry.newest.remote(), CALL_S)
        yield RayWeightStore(run)
    finally:
        with suppress(RayError, WeightError):
            answer(registry.close.remote(), CLOSE_S)
            ray.kill(registry)


class RayWeightStore:
    """Weight store of one run, for any process that is connected to its cluster. Picklable, thread-safe."""

    def __init__(self, run: str) -> None:
        """Attach to an existing store; `ray_weights` makes one."""
        self._run = run
        self._known_registry: Any = None
        self._known_place: tuple[Place, NodeStore] | None = None
        self._known_draft: tuple[Manifest, Opened] | None = None
        """The publication that this process took part in last."""

    def __reduce__(self) -> tuple[type[Self], tuple[str]]:
        return type(self), (self._run,)

    # --- the port

    def publish(self, manifest: Manifest, buckets: Iterable[bytes | memoryview]) -> None:
        self.begin(manifest)
        try:
            writes = [
                self._write(manifest.version, index, bucket) for index, bucket in checked_buckets(manifest, buckets)
            ]
            self._settle(manifest.version, writes)
            self.commit(manifest.version)
        except BaseException:
            with suppress(RayError, WeightError):
                self.abort(manifest.version)
            raise

    def manifest(self, version: Version) -> Manifest:
        return msgspec.json.decode(self._ask("manifest", version), type=Manifest)

    def bucket(self, version: Version, index: int) -> bytes | memoryview:
        """A read-only view of this node's copy, which is fetched first if there is none."""
        try:
            return self._place()[1].bucket(version, index)
        except VersionMissing:
            return self.on_this_node(version).bucket(version, index)

    def newest(self) -> Version | None:
        newest: Version | None = self._ask("newest")
        return newest

    def drop(self, version: Version) -> None:
        self._ask("drop", version)

    # --- publication in parts, by several ranks

    def begin(self, manifest: Manifest) -> None:
        """Begin to publish a version from this node. Other nodes begin to fetch it, bucket by bucket."""
        self._known_draft = manifest, self._ask("begin", msgspec.json.encode(manifest), _own_node())

    def put(self, version: Version, index: int, data: bytes | memoryview) -> None:
        """Add a bucket, from any process on any node, in any order; raises `DigestMismatch` if its bytes are wrong."""
        self._settle(version, [self._write(version, index, data)])

    def commit(self, version: Version, wait_s: float = 0.0) -> None:
        """Make the version visible, once its buckets are all there."""
        self._ask("commit", version, wait_s, within_s=wait_s + CALL_S)

    def abort(self, version: Version) -> None:
        """End a publication; nothing is published. No effect on a published version."""
        self._ask("abort", version)

    # --- this node

    def on_this_node(self, version: Version) -> WeightStore:
        """A store with the version that any process of this node can read, also one that is not connected to Ray."""
        place, store = self._place()
        try:
            answer(place.holder.pull.remote(version), PULL_S)
        except RayActorError:  # it died: its successor fetches the version again
            place, store = self._place(broken=place.name)
            answer(place.holder.pull.remote(version), PULL_S)
        return store

    def nodes_of(self, version: Version) -> list[str]:
        """Ids of the nodes that have a version."""
        nodes: list[str] = self._ask("nodes_of", version)
        return nodes

    def release(self, node: str) -> None:
        """End what this store has on a node that leaves, once nothing there reads from it. Never fails.

        Ray takes a node for drained only when no process runs there.
        """
        with suppress(RayError, WeightError):
            self._ask("release", node)

    def _write(self, version: Version, index: int, data: bytes | memoryview) -> Any:
        """Write a bucket to its place; returns the pending call that reports it to the holder, if any."""
        manifest, opened = self._draft(version)
        if opened.node != _own_node():
            try:
                weight_stream.give(opened.address, opened.credentials, manifest, index, data)
            except LinkError as error:
                raise _not_there(version, error) from error
            return None
        place, store = self._place(wanted=opened.holder)
        copy_bucket(manifest, index, data, store.place(manifest, opened.slot, index))
        return place.holder.filled.remote(version, index)

    def _settle(self, version: Version, writes: list[Any]) -> None:
        """Wait until the holder knows of buckets that were written."""
        try:
            answer([call for call in writes if call is not None], CALL_S)
        except RayActorError as error:
            raise _not_there(version, error) from error

    def _place(self, *, broken: str = "", wanted: str = "") -> tuple[Place, NodeStore]:
        """This node's holder and its store: not the holder named `broken`, but the one that is `wanted`."""
        if self._known_place is None or broken or (wanted and self._known_place[0].name != wanted):
            place: Place = self._ask("place", _own_node(), broken)
            self._known_place = place, pickle.loads(place.store)
        return self._known_place

    def _draft(self, version: Version) -> tuple[Manifest, Opened]:
        if self._known_draft is None or self._known_draft[0].version != version:
            opened: Opened = self._ask("opened", version)
            self._known_draft = msgspec.json.decode(opened.manifest, type=Manifest), opened
        return self._known_draft

    def _ask(self, method: str, *arguments: object, within_s: float = CALL_S) -> Any:
        try:
            return answer(getattr(self._registry(), method).remote(*arguments), within_s)
        except RayActorError as error:
            raise self._is_gone() from error

    def _registry(self) -> Any:
        if self._known_registry is None:
            try:
                self._known_registry = ray.get_actor(_registry_name(self._run), namespace=NAMESPACE)
            except ValueError as error:  # there is none of this name
                raise self._is_gone() from error
        return self._known_registry

    def _is_gone(self) -> WeightError:
        return WeightError(f"the weight store of {self._run} is gone: its controller has closed it or has ended")


def _not_there(version: Version, error: Exception) -> WeightError:
    return WeightError(
        f"a bucket of {version} did not reach the holder of its node: {error}. Nothing was published; publish again."
    )


def _own_node() -> str:
    node: str = ray.get_runtime_context().get_node_id()
    return node


def _registry_name(run: str) -> str:
    return f"{run}-weights"
