"""The ReplicaStarter port: starts replicas of a reward function, as child processes or on the nodes of a cluster.

    reward worker, one thread per slot                                   replica
    ReplicaStarter.start(order) ───────────────────────────────────────► builds its body from a factory path
    Replica.call(request, limit_s) ────────────────────────────────────► body(request), one at a time
    Replica.kill ──────────────────────────────────────────────────────► gone, whatever it was doing

Invariants of every implementation: no replica outlives the reward worker or `kill`; a call that exceeds its limit
raises `ReplicaLate`, after which the replica has to be killed; a replica that is gone raises `ReplicaLost`.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

START_S = 300.0
"""Limit of the start of a replica, which imports the function. It does not count as a call."""
ReplicaBody = Callable[[bytes], bytes]
"""Answers requests; made by `factory(function)`."""


class ReplicaOrder(NamedTuple):
    """What to start."""

    body: str
    """Factory path of the `ReplicaBody`."""
    function: str
    """Path of the reward function, the argument of the factory."""
    number: int
    """Number of the replica, for its log."""


class ReplicaLate(Exception):
    """A call took longer than its limit."""


class ReplicaLost(Exception):
    """The replica is gone, or could not be started; the text is the cause."""


class Replica(Protocol):
    """Used by one thread."""

    def wait_until_ready(self, limit_s: float) -> None:
        """Wait until it can be called. `ReplicaLost` if it cannot be started, or not within the limit."""
        ...

    def call(self, request: bytes, limit_s: float) -> bytes:
        """Answer a request; the limit may be infinite."""
        ...

    def kill(self) -> None:
        """End it, whatever it is doing; returns when it is gone. Idempotent."""
        ...


class ReplicaStarter(Protocol):
    """How replicas are started. Part of a worker's settings, hence picklable."""

    def start(self, order: ReplicaOrder) -> Replica:
        """Start a replica, which may not be ready yet. `ReplicaLost` if that fails."""
        ...
