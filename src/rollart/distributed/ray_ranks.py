"""Ranks of a trainer on the nodes of a Ray cluster: a `Cluster` that rank 0, the trainer's worker, makes and conducts.

    controller ──(Train with the share of rank 0)──► rank 0 ──(calls)──► rank 1 … rank n−1
         └──(the share of each other rank, directly)──────────────────────┘

Ranks are actors of rank 0 and end with it. They reserve room if rank 0 has reserved some; on the private Ray of one
machine nothing is reserved. Their logs lie beside that of rank 0, `<worker>.rank-<rank>.log`.

Shares. `ShareSender`, in the controller, splits a `Train`, sends every other rank its share by name and leaves that of
rank 0 in the command. So a batch leaves the controller once in total, and no share passes through another rank.
"""

import logging
import queue
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import ray
from ray.exceptions import RayError

from rollart.distributed.cluster import BESIDE, Cluster
from rollart.distributed.rank_placement import release_ranks
from rollart.distributed.ray_process import Order, OwnProcess, own_process, prepare_process
from rollart.distributed.travelling import TravellingFolder, unpack
from rollart.distributed.wire import decode, encode
from rollart.distributed.worker import Worker, register
from rollart.ports.factory import load
from rollart.ports.ranks import BodyFactory, Failure, RankFailed, RankListener, RankOrder
from rollart.types.errors import RankError, RankLost, RequestError
from rollart.types.ids import ClaimId, WorkerId
from rollart.types.messages import Train, WorkerCommand
from rollart.types.placement import NOTHING, Needs
from rollart.types.rank_shares import Share, split

logger = logging.getLogger(__name__)

SHARE_S = 600.0
"""How long a rank waits for its share of a batch."""
KEPT_SHARES = 2


@dataclass(frozen=True)
class RayRanks:
    """Starts ranks as Ray actors (`ports.ranks.RankStarter`)."""

    ranks: int
    minibatches: int = 1
    needs: Needs = NOTHING
    """What one rank reserves."""
    place_s: float = 600.0
    """How long ranks may wait for nodes."""

    def address(self) -> str:
        address: str = ray.util.get_node_ip_address()
        return address

    def start(self, order: RankOrder, listener: RankListener) -> "RayGroup":
        if order.info.ranks != self.ranks:
            raise RequestError(f"the trainer has {order.info.ranks} ranks, but its starter is for {self.ranks}")
        return RayGroup(self, order, listener, own_process())

    def sender(self, worker: WorkerId) -> "ShareSender | None":
        """Sender of shares to the ranks of this worker; None if rank 0 is the only one."""
        return ShareSender(worker, self.ranks, self.minibatches) if self.ranks > 1 else None


class RemoteRank(Worker):
    """The process of a rank other than 0: hosts its body."""

    def __init__(self, order: RankOrder, travelling: Mapping[str, TravellingFolder]) -> None:
        self._order = order
        self._travelling = travelling
        self._ready = threading.Event()
        self._changed = threading.Condition()
        self._shares: dict[ClaimId, Share] = {}

    @register()
    def build(self) -> None:
        info = self._order.info._replace(rank=self.rank, address=self.address)
        factory = cast("BodyFactory", load(self._order.body))
        # Folders of the controller, such as the model, have another path here than on the node of rank 0.
        self._body = factory(dict(self._order.settings) | unpack(self._travelling), info, self._ready.set)

    @register(beside=True)
    def ready(self) -> None:
        """Block until the body is about to join the process group."""
        self._ready.wait()

    @register()
    def do(self, call: bytes, share: Share | None) -> None:
        self._body.do(call, share)

    @register()
    def do_with_share_of(self, call: bytes, claim: ClaimId) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: claim in self._shares, SHARE_S):
                raise RankFailed(Failure(f"the controller did not send the share of claim {claim} in {SHARE_S:g} s"))
            share = self._shares.pop(claim)
        self._body.do(call, share)

    @register(beside=True)
    def take(self, blob: bytes) -> None:
        """Take a share from the controller."""
        (train,) = cast("list[Train]", decode(blob))
        with self._changed:
            while len(self._shares) >= KEPT_SHARES:  # of claims that were never trained
                del self._shares[next(iter(self._shares))]
            self._shares[train.claim] = Share(train.samples, train.batches, train.minibatches)
            self._changed.notify_all()


class RayGroup:
    """The started ranks (`ports.ranks.RankGroup`)."""

    def __init__(self, starter: RayRanks, order: RankOrder, listener: RankListener, own: OwnProcess | None) -> None:
        self._listener = listener
        self._lock = threading.Lock()
        self._ended: set[int] = set()
        log = "" if own is None else str(Path(own.order.log).with_suffix(".rank-{rank}.log"))
        self.cluster = Cluster(
            RemoteRank,
            order.info.ranks - 1,
            order,
            {} if own is None else own.travelling,
            name="" if own is None else own.order.worker,
            needs=starter.needs if own is not None and own.reserved else None,
            place_s=starter.place_s,
            first=1,
            prepare=None if own is None else partial(_prepare, own.order_for_others(), log),
            log=log,
            on_lost=self._lost,
        )
        for rank in self.cluster.rank_numbers:
            self._report(rank, self.cluster.start_on(rank, "build"))
            self.cluster.start_on(rank, "ready").add_done_callback(partial(self._is_ready, rank))

    def call(self, rank: int, call: bytes, share: Share | None = None) -> None:
        self._report(rank, self.cluster.start_on(rank, "do", call, share))

    def call_with_share_of(self, rank: int, call: bytes, claim: ClaimId) -> None:
        self._report(rank, self.cluster.start_on(rank, "do_with_share_of", call, claim))

    def close(self) -> None:
        self.cluster.close()

    def _is_ready(self, rank: int, done: "Future[Any]") -> None:
        if done.exception() is None:
            self._listener.ready(rank)

    def _report(self, rank: int, call: "Future[Any]") -> None:
        """A call that fails is the end of its rank."""
        call.add_done_callback(lambda done: self._failed(rank, done.exception()))

    def _failed(self, rank: int, error: BaseException | None) -> None:
        if error is None or isinstance(error, RankLost):
            return  # its loss is reported once, by the cluster
        cause = error.__cause__ if isinstance(error, RankError) else error
        failure = cause.failure if isinstance(cause, RankFailed) else Failure(f"{type(error).__name__}: {error}")
        self._end(rank, failure)

    def _lost(self, rank: int, error: RankLost) -> None:
        self._end(rank, Failure(error.cause))

    def _end(self, rank: int, failure: Failure) -> None:
        with self._lock:
            if rank in self._ended:
                return
            self._ended.add(rank)
        node = self.cluster.nodes.get(rank)
        where = "" if node is None else f" (on node {node})"
        self._listener.ended(rank, failure._replace(cause=failure.cause + where))


def _prepare(order: Order, log: str, rank: int) -> None:
    prepare_process(order, Path(log.format(rank=rank)), f"{order.worker}.rank-{rank}")


class ShareSender:
    """In the controller: gives the ranks of one trainer their shares. Ray's calls may block, so a thread makes them."""

    def __init__(self, worker: WorkerId, ranks: int, minibatches: int) -> None:
        self._worker = worker
        self._ranks = ranks
        self._minibatches = minibatches
        self._queue: queue.SimpleQueue[tuple[int, Train] | None] = queue.SimpleQueue()
        self.sent_bytes: dict[int, int] = {}
        """By rank, since the start."""
        threading.Thread(target=self._send, name=f"shares of {worker}", daemon=True).start()

    def divide(self, commands: Sequence[WorkerCommand]) -> list[WorkerCommand]:
        """The commands for rank 0; the shares of the other ranks are on their way."""
        return [self._divided(command) if isinstance(command, Train) else command for command in commands]

    def close(self) -> None:
        self._queue.put(None)

    def release(self) -> None:
        """Give back the room of the ranks, without waiting for Ray: a rank 0 that was killed could not."""
        threading.Thread(target=release_ranks, args=(self._worker,), daemon=True).start()

    def _divided(self, train: Train) -> Train:
        own, *others = (
            Train(train.claim, train.version, share.samples, share.batches, share.minibatches)
            for share in split(train.samples, self._ranks, self._minibatches)
        )
        if not own.minibatches:
            return train  # nothing to train: all ranks learn that from rank 0
        for rank, share in enumerate(others, 1):
            self._queue.put((rank, share))
        return own

    def _send(self) -> None:
        actors: dict[int, Any] = {}
        while (next_share := self._queue.get()) is not None:
            rank, share = next_share
            blob = encode([share])
            self.sent_bytes[rank] = self.sent_bytes.get(rank, 0) + len(blob)
            try:
                if rank not in actors:
                    actors[rank] = ray.get_actor(f"{self._worker} rank {rank}")
                actors[rank].call.options(concurrency_group=BESIDE).remote("take", (blob,), {})
            except (RayError, ValueError) as error:  # it is gone; rank 0 notices that too, and ends
                logger.info("rank %d of %s did not get its share: %s", rank, self._worker, error)
