"""Batch-level environment barrier of `sync`: no member takes its next turn before all members have arrived.

Every member is either away (generating, or in its environment) or waiting; the barrier opens when none is away. A
member that ends leaves the barrier, which may open it, so the barrier never waits for a member that is gone.
"""

from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class TurnBarrier(Generic[K]):
    """Barrier that releases its members in insertion order."""

    def __init__(self) -> None:
        self._away: dict[K, None] = {}
        self._waiting: dict[K, None] = {}

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def join(self, member: K) -> None:
        """Add a member, away until it first arrives."""
        self._away[member] = None

    def arrive(self, member: K) -> list[K]:
        """Mark the member as waiting. Returns the members to release now: none or all."""
        del self._away[member]
        self._waiting[member] = None
        return self._open()

    def leave(self, member: K) -> list[K]:
        """Remove the member, away or waiting. Returns the members to release now."""
        self._away.pop(member, None)
        self._waiting.pop(member, None)
        return self._open()

    def _open(self) -> list[K]:
        if self._away or not self._waiting:
            return []
        released = list(self._waiting)
        self._away, self._waiting = self._waiting, {}
        return released
