"""The batch-level environment barrier of `sync`: nobody takes the next turn before everybody has arrived.

Every member is either away (generating, in its environment) or waiting; the barrier opens when none is away. A member
that ends leaves, which may open it. So it never waits for somebody who is gone.
"""

from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class TurnBarrier(Generic[K]):
    """Insertion order decides the order of release."""

    def __init__(self) -> None:
        self._away: dict[K, None] = {}
        self._waiting: dict[K, None] = {}

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def join(self, member: K) -> None:
        """A new member, away until it first arrives."""
        self._away[member] = None

    def arrive(self, member: K) -> list[K]:
        """The member waits from here on. Gives those that go on now: nobody, or everybody."""
        del self._away[member]
        self._waiting[member] = None
        return self._open()

    def leave(self, member: K) -> list[K]:
        """The member is gone, wherever it was. Gives those that go on now."""
        self._away.pop(member, None)
        self._waiting.pop(member, None)
        return self._open()

    def _open(self) -> list[K]:
        if self._away or not self._waiting:
            return []
        released = list(self._waiting)
        self._away, self._waiting = self._waiting, {}
        return released
