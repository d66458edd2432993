"""The holder of a node: owns the node's copy of the weight versions, in shared memory of that node.

    publisher on this node ──► slot of a draft ─┐            ┌──► engines of this node read the slots
    ranks on other nodes ────► stream ──────────┤── Holder ──┤
    another holder ──────────► stream ──────────┘            └──► other holders fetch from it, also from a draft

Invariants: every version is fetched once per node, whatever number of engines wants it; a version becomes visible on a
node only after the registry has committed it; the holder keeps what it has when a publisher or an engine dies, and ends
with the registry.
"""

import logging
import os
import pickle
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, cast

import msgspec
import ray
from ray.actor import ActorHandle

from rollart.distributed import weight_stream
from rollart.distributed.handshake import Credentials
from rollart.distributed.link import Address
from rollart.distributed.ray_calls import CALL_S, answer
from rollart.distributed.weight_stream import StreamServer
from rollart.ports.factory import load
from rollart.ports.weights import WeightStore
from rollart.types.errors import LinkError, VersionMissing, WeightError
from rollart.types.versions import Version
from rollart.types.weights import Manifest

logger = logging.getLogger(__name__)

PULL, WATCH = "pull", "watch"
"""Concurrency groups: calls that wait for a version do not delay the others."""
GROUPS = {PULL: 64, WATCH: 1}
THREADS = 16
COMMIT_S = 60.0
"""How long a version that was fetched while it was published waits for the end of its publication."""
PULL_S = 600.0
ATTEMPTS = 3


class NodeDraft(Protocol):
    """A version that is being written to its node's memory."""

    @property
    def slot(self) -> int: ...

    @property
    def evicted(self) -> set[Version]: ...

    @property
    def manifest(self) -> Manifest: ...

    def place(self, index: int) -> memoryview: ...

    def commit(self) -> None: ...

    def close(self) -> None: ...


class NodeStore(WeightStore, Protocol):
    """The weight store of one node; `SharedMemoryStore` is one. Pickled, it is attached to from the same node."""

    def begin(self, manifest: Manifest) -> NodeDraft: ...

    def place(self, manifest: Manifest, slot: int, index: int) -> memoryview: ...

    def lend(self, version: Version, index: int) -> AbstractContextManager[memoryview]: ...

    def close(self) -> None: ...


class HolderOrder(msgspec.Struct, frozen=True):
    """What a holder needs to know."""

    node: str
    """Id of its node."""
    name: str
    """Name of its store, unique on its machine."""
    factory: str
    """Factory path that creates the node's store from its name and `settings`."""
    settings: Mapping[str, Any]
    credentials: Credentials


class Holder:
    """The holder of one node, as a Ray actor with threads."""

    def __init__(self, order: HolderOrder, registry: ActorHandle) -> None:
        self._node = order.node
        self._credentials = order.credentials
        self._registry: Any = registry
        self._store = cast("NodeStore", load(order.factory)(order.name, ordered=False, **order.settings))
        self._lock = threading.Lock()
        self._drafts: dict[Version, _Filling] = {}
        """Versions that are being published on this node."""
        self._pulls: dict[Version, Future[None]] = {}
        self._closed = threading.Event()
        self._server = StreamServer(ray.util.get_node_ip_address(), order.credentials, self)

    def place(self) -> tuple[bytes, Address]:
        """Its store, pickled, for processes of this node, and its address, for other nodes."""
        return pickle.dumps(self._store), self._server.address

    def ping(self) -> int:
        """Its process id."""
        return os.getpid()

    @ray.method(concurrency_group=WATCH)  # type: ignore[untyped-decorator]
    def wait(self) -> None:
        """Block until it is closed; fails if its process dies."""
        self._closed.wait()

    def close(self) -> None:
        """Remove the node's copy. Existing views of readers stay valid."""
        self._server.close()
        for version in list(self._drafts):
            self.discard(version)
        self._store.close()
        self._closed.set()

    # --- publication on this node

    def begin(self, data: bytes) -> tuple[int, set[Version]]:
        """Take a slot for a version; returns it and the versions that were evicted for it."""
        manifest = msgspec.json.decode(data, type=Manifest)
        if manifest.depends_on is not None:
            self._need(manifest.depends_on)
        draft = self._store.begin(manifest)
        with self._lock:
            self._drafts[manifest.version] = _Filling(draft)
        return draft.slot, draft.evicted

    def filled(self, version: Version, index: int) -> None:
        """A process of this node has written and verified a bucket of a draft."""
        self._draft(version).fill(index)

    @ray.method(concurrency_group=PULL)  # type: ignore[untyped-decorator]
    def commit(self, version: Version, wait_s: float) -> None:
        """Make a draft visible on this node, once its buckets are all there; called by the registry."""
        self._draft(version).commit(wait_s)
        with self._lock:
            self._drafts.pop(version).close()

    def discard(self, version: Version) -> None:
        """Forget a draft; its slot is free again."""
        with self._lock:
            draft = self._drafts.pop(version, None)
        if draft is not None:
            draft.close()

    def drop(self, version: Version) -> None:
        try:
            self._store.drop(version)
        except WeightError as error:
            logger.warning("%s stays on this node: %s", version, error)

    # --- copies

    def prefetch(self, version: Version) -> None:
        """Begin to fetch a version that is being published elsewhere."""
        self._start_pull(version)

    @ray.method(concurrency_group=PULL)  # type: ignore[untyped-decorator]
    def pull(self, version: Version) -> None:
        """Return when the version can be read on this node; raises `WeightError` if it cannot be fetched."""
        self._need(version)

    def _need(self, version: Version) -> None:
        for attempt in range(ATTEMPTS):
            try:
                self._start_pull(version).result(PULL_S)
            except VersionMissing:
                raise
            except WeightError:
                if attempt + 1 == ATTEMPTS:
                    raise
            except TimeoutError:
                raise WeightError(f"{version} could not be fetched within {PULL_S:g} s") from None
            else:
                return

    def _start_pull(self, version: Version) -> "Future[None]":
        with self._lock:
            running = self._pulls.get(version)
            if running is not None:
                return running
            pull = self._pulls[version] = Future()
        threading.Thread(target=self._run_pull, args=(version, pull), name=f"pull {version}", daemon=True).start()
        return pull

    def _run_pull(self, version: Version, pull: "Future[None]") -> None:
        failure: BaseException | None = None
        try:
            if not self._holds(version):
                self._fetch(version)
        except BaseException as error:  # noqa: BLE001 - raised by those who wait
            logger.warning("%s was not fetched: %s", version, error)
            failure = error
        with self._lock:
            del self._pulls[version]
        if failure is None:
            pull.set_result(None)
        else:
            pull.set_exception(failure)

    def _holds(self, version: Version) -> bool:
        try:
            self._store.manifest(version)
        except VersionMissing:
            return False
        return True

    def _fetch(self, version: Version) -> None:
        data, addresses = answer(self._registry.sources.remote(version), CALL_S)
        manifest = msgspec.json.decode(data, type=Manifest)
        if manifest.depends_on is not None:
            self._need(manifest.depends_on)
        draft = self._store.begin(manifest)
        try:
            self._registry.evicted.remote(self._node, draft.evicted)
            self._receive(draft, [address for address in addresses if address != self._server.address])
            if not answer(self._registry.committed.remote(version), COMMIT_S):
                raise VersionMissing(f"the publication of {version} was given up")
            draft.commit()
        finally:
            draft.close()
        if not answer(self._registry.arrived.remote(version, self._node), CALL_S):
            self.drop(version)  # dropped meanwhile

    def _receive(self, draft: NodeDraft, addresses: list[Address]) -> None:
        """Fetch all buckets, from the first source that has them."""
        missing = list(range(len(draft.manifest.digests)))
        reasons = []
        for address in addresses:
            try:
                weight_stream.fetch(address, self._credentials, draft.manifest, missing, draft.place)
            except (LinkError, WeightError) as error:
                reasons.append(str(error))
                continue
            return
        raise WeightError(
            f"{draft.manifest.version} cannot be fetched by node {self._node[:8]}: {'; '.join(reasons) or 'no source'}"
        )

    # --- what the server offers

    def reading(self, version: Version, index: int) -> AbstractContextManager[memoryview]:
        with self._lock:
            filling = self._drafts.get(version)
        return self._store.lend(version, index) if filling is None else nullcontext(filling.wait_for(index))

    def writing(self, version: Version, index: int) -> AbstractContextManager[tuple[Manifest, memoryview]]:
        return self._draft(version).writing(index)

    def _draft(self, version: Version) -> "_Filling":
        with self._lock:
            filling = self._drafts.get(version)
        if filling is None:
            raise WeightError(f"{version} is not being published on this node; begin its publication again")
        return filling


class _Filling:
    """A version that is being published: which buckets are there."""

    def __init__(self, draft: NodeDraft) -> None:
        self._draft = draft
        self._filled: set[int] = set()
        self._over = False
        self._news = threading.Condition()

    def fill(self, index: int) -> None:
        with self._news:
            self._filled.add(index)
            self._news.notify_all()

    def wait_for(self, index: int) -> memoryview:
        with self._news:
            done = self._news.wait_for(lambda: index in self._filled or self._over, weight_stream.STALL_S)
            if index not in self._filled:
                why = "was given up" if done else f"has brought no bucket for {weight_stream.STALL_S:g} s"
                raise WeightError(f"the publication of {self._draft.manifest.version} {why}")
        return self._draft.place(index)

    @contextmanager
    def writing(self, index: int) -> Iterator[tuple[Manifest, memoryview]]:
        yield self._draft.manifest, self._draft.place(index)
        self.fill(index)

    def commit(self, wait_s: float) -> None:
        total = len(self._draft.manifest.digests)
        with self._news:
            self._news.wait_for(lambda: len(self._filled) == total or self._over, wait_s)
            if self._over:
                raise WeightError(f"the publication of {self._draft.manifest.version} was given up")
            missing = total - len(self._filled)
        if missing:
            raise WeightError(
                f"{self._draft.manifest.version} lacks {missing} of its {total} buckets. Nothing was published."
            )
        self._draft.commit()

    def close(self) -> None:
        with self._news:
            self._over = True
            self._news.notify_all()
        self._draft.close()


HOLDER = ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0, max_concurrency=THREADS, concurrency_groups=GROUPS)(
    Holder
)
