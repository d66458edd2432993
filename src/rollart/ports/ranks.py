"""The RankStarter port: starts the ranks of a trainer other than 0, as child processes or on the nodes of a cluster.

    rank 0, the worker that the controller talks to                        rank 1 … rank n−1
    RankStarter.start ───────────────────────────────────────────────────► builds its RankBody from a factory path
    RankListener.ready, .ended ◄─────────────────────────────────────────── about to join the process group; failed
    RankGroup.call ──────────────────────────────────────────────────────► RankBody.do, one at a time, in order

Invariants of every implementation: no rank outlives rank 0 or `RankGroup.close`; a rank that exits or raises is
reported at once, with its cause, by `ended`; calls of one rank arrive in order, each at most once.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from rollart.types.ids import ClaimId, WorkerId
from rollart.types.messages import WorkerCommand
from rollart.types.rank_shares import Share


class Failure(NamedTuple):
    """Why a rank ended."""

    cause: str
    echo: bool = False
    """The rank only observed the loss of another one."""


class RankFailed(Exception):
    """A call failed in a rank, which cannot go on."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failure = failure

    def __str__(self) -> str:
        return self.failure.cause


class RankInfo(NamedTuple):
    """What a rank needs to join the process group."""

    rank: int
    ranks: int
    device: str
    """`cpu`, or `cuda`."""
    rendezvous: tuple[str, int]
    """Address of rank 0's store."""
    address: str
    """Own address, on the network that connects the ranks. Nothing listens on another one."""


class RankOrder(NamedTuple):
    """Which ranks to start."""

    body: str
    """Factory path of `RankBody`."""
    settings: Any
    """Settings of the bodies; picklable."""
    info: RankInfo
    """That of rank 0."""


class RankBody(Protocol):
    """What runs in the process of a rank. The factory is called with settings, `RankInfo` and `ready`, which the body
    calls once it is about to join the process group."""

    def do(self, call: bytes, share: Share | None) -> None:
        """Execute a call of rank 0; raises `RankFailed` if the rank cannot go on."""
        ...


BodyFactory = Callable[[Any, RankInfo, Callable[[], None]], RankBody]


class RankListener(Protocol):
    """Observer of ranks, called from any thread."""

    def ready(self, rank: int) -> None: ...

    def ended(self, rank: int, failure: Failure) -> None:
        """The rank is gone or useless. At most once per rank, and not for what `close` ended."""
        ...


class RankGroup(Protocol):
    """The started ranks, as seen by rank 0."""

    def call(self, rank: int, call: bytes, share: Share | None = None) -> None:
        """Make a rank execute a call, with its share of a batch; returns before it is executed."""
        ...

    def call_with_share_of(self, rank: int, call: bytes, claim: ClaimId) -> None:
        """As `call`, with the share that the controller sends to the rank for this claim."""
        ...

    def close(self) -> None:
        """End all ranks, whatever they are doing; returns when they are gone. Called once."""
        ...


class Shares(Protocol):
    """In the controller: sends the ranks of one trainer their shares of batches."""

    def divide(self, commands: Sequence[WorkerCommand]) -> list[WorkerCommand]:
        """Send the shares of the other ranks; returns the commands for rank 0, with its share only."""
        ...

    def close(self) -> None:
        """Send no more."""
        ...

    def release(self) -> None:
        """The worker is gone: give back what its ranks reserved, if it could not."""
        ...


class RankStarter(Protocol):
    """How ranks are started. Part of a trainer's settings, hence picklable."""

    def address(self) -> str:
        """Address of this process on the network that connects the ranks."""
        ...

    def sender(self, worker: WorkerId) -> Shares | None:
        """Sender of shares to the ranks of this worker, called in the controller; None if rank 0 sends them."""
        ...

    def start(self, order: RankOrder, listener: RankListener) -> RankGroup:
        """Start ranks 1 … n−1; called in the process of rank 0. What fails later is reported to the listener."""
        ...
