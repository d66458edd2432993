"""The ranks of one trainer: rank 0 is the worker that the controller talks to and conducts the others.

    worker, rank 0 ──(calls, each with a share of the batch)──► rank 1 … rank n−1     a RankStarter starts and ends them
         │  ◄──(ready; cause of a failure)──────────────────────────┘
         └── collectives over gloo (CPU) or NCCL (CUDA): all ranks call the same method of their trainer concurrently

Invariants:
- No rank outlives rank 0, however rank 0 ended (`ports.ranks`).
- A rank that exits or raises is noticed at once, not after a collective's timeout: `check` and `do` raise `TrainerLost`
  with the rank and its cause, and the other ranks are terminated.
- A call is sent to all ranks before rank 0 makes it itself, so between two calls of `do` no rank waits for another.
- A rank gets its own share of a batch and no other; where the controller sends shares, they do not pass rank 0.

The starter is `child_ranks` on one machine without Ray, and `distributed.ray_ranks` on the nodes of a cluster.
"""

import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from rollart.backends.trainers.packing import Untrainable
from rollart.backends.trainers.process_group import COLLECTIVE_TIMEOUT_S, Membership, serve_store
from rollart.ports.ranks import Failure, RankInfo, RankOrder, RankStarter
from rollart.types.errors import RequestError, RollartError, TrainerLost
from rollart.types.ids import ClaimId
from rollart.types.rank_shares import Share

T = TypeVar("T")

BODY = "rollart.backends.trainers.rank_process:TrainerRank"
BLAME_S = 3.0
"""How long a failed collective waits to learn which rank caused it."""
ANOTHER_S = 10.0
"""How long a trainer waits for another one in this process to close."""
_PROCESS_GROUP_LOCK = threading.Lock()


class RankHandle:
    """A rank's membership in the group, in its own process."""

    def __init__(self, info: RankInfo, ready: Callable[[], None]) -> None:
        self.info = info
        self._ready = ready

    def meet(self) -> DeviceMesh:
        self._ready()
        return Membership(self.info).join()


class Ranks:
    """All ranks, as seen by rank 0."""

    def __init__(
        self, settings: Any, ranks: int, device: str, wake: Callable[[], None], *, starter: RankStarter
    ) -> None:
        """Starts the other ranks with these settings, which must be picklable; `wake` is called when one is lost."""
        if device not in ("cpu", "cuda"):
            raise RequestError(f"{ranks} ranks cannot share {device!r}; set `device` to cpu, or to cuda (one GPU each)")
        if not _PROCESS_GROUP_LOCK.acquire(timeout=ANOTHER_S):
            raise RequestError("this process already has a trainer with several ranks; close it, or use a new process")
        self._wake = wake
        self._changed = threading.Condition()
        self._ready: set[int] = set()
        self._failures: dict[int, Failure] = {}
        self._closed = False
        try:
            address = starter.address()
            store, port = serve_store(address, ranks)
            self.info = RankInfo(0, ranks, device, (address, port), address)
            self._membership = Membership(self.info, store)
            self._group = starter.start(RankOrder(BODY, settings, self.info), self)
        except BaseException:
            _PROCESS_GROUP_LOCK.release()
            raise

    def meet(self) -> DeviceMesh:
        """Wait until the other ranks are ready, then join the process group."""
        others = set(range(1, self.info.ranks))
        with self._changed:
            there = self._changed.wait_for(lambda: bool(self._failures) or self._ready == others, COLLECTIVE_TIMEOUT_S)
        self.check()
        if not there:
            late = sorted(others - self._ready)
            raise TrainerLost(f"ranks {late} of the trainer did not start within {COLLECTIVE_TIMEOUT_S:g} s")
        if dist.is_initialized():
            raise RequestError("torch.distributed is already in use in this process; run the trainer in its own")
        with self._blaming():
            return self._membership.join()

    def do(self, work: Callable[..., T], *args: Any) -> T:
        """Call this method on every rank's trainer; returns the local result.

        Deliberate errors are raised by all ranks at the same point; `Untrainable` leaves them usable.
        """
        call = self._begin(work, args)
        with self._blaming():
            for rank in range(1, self.info.ranks):
                self._group.call(rank, call)
            return work(*args)

    def do_shares(self, work: Callable[..., T], shares: Sequence[Share], *args: Any) -> T:
        """Call this method on every rank's trainer, with the rank's share as its last argument."""
        call = self._begin(work, args)
        with self._blaming():
            for rank in range(1, self.info.ranks):
                self._group.call(rank, call, shares[rank])
            return work(*args, shares[0])

    def do_sent_shares(self, work: Callable[..., T], own: Share, claim: ClaimId, *args: Any) -> T:
        """As `do_shares`, if the controller sends the shares of this claim to the other ranks."""
        call = self._begin(work, args)
        with self._blaming():
            for rank in range(1, self.info.ranks):
                self._group.call_with_share_of(rank, call, claim)
            return work(*args, own)

    def check(self) -> None:
        """Raise `TrainerLost` if a rank is gone."""
        if self._failures:
            lost = self._blame()
            assert lost is not None
            raise lost

    def close(self) -> None:
        """Terminate the other ranks, whatever they are doing, and leave the process group."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
        self._group.close()
        self._membership.leave()
        _PROCESS_GROUP_LOCK.release()

    # --- of the ranks, from any thread

    def ready(self, rank: int) -> None:
        with self._changed:
            self._ready.add(rank)
            self._changed.notify_all()

    def ended(self, rank: int, failure: Failure) -> None:
        with self._changed:
            if self._closed:
                return
            self._failures[rank] = failure
            self._changed.notify_all()
        if not failure.echo:
            self._membership.abort()
        self._wake()

    def _begin(self, work: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
        self.check()
        return pickle.dumps((work.__name__, args))

    @contextmanager
    def _blaming(self) -> Iterator[None]:
        """An error that follows from the loss of a rank is raised as that loss."""
        try:
            yield
        except (Untrainable, RollartError):
            raise
        except Exception as error:
            lost = self._blame()
            if lost is None:
                raise
            raise lost from error

    def _blame(self) -> TrainerLost | None:
        """The rank that failed first; ranks that failed because of it may have reported earlier."""
        with self._changed:
            self._changed.wait_for(lambda: any(not each.echo for each in self._failures.values()), BLAME_S)
            failures = sorted(self._failures.items(), key=lambda each: each[1].echo)
        if not failures:
            return None
        self.close()
        rank, failure = failures[0]
        return TrainerLost(
            f"rank {rank} of {self.info.ranks} of the trainer is lost: {failure.cause}. "
            "The trainer restarts from its last checkpoint."
        )
