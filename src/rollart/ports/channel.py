"""A reliable link over an unreliable transport.

For runtimes whose workers are remote. Each side numbers its items and resends them until the other side has
acknowledged them; each item is delivered exactly once and in order. Lost, duplicated, delayed and reordered packets are
invisible to the layers above: what remains is delay, or silence, after which the other side is considered dead.
Reliability is implemented here only, so all layers above may rely on it.

    sender                      link                 receiver
    send [a b]   packet 0: a b   ─► lost
    (resend_s)   packet 0: a b   ─────────────────►  takes a b, owes an acknowledgement
                                 ◄──── ack 2 ──────
    send [c]     packet 2: c     ─► doubled ──────►  takes c once
"""

from typing import Generic, TypeVar

import msgspec

Out = TypeVar("Out")
In = TypeVar("In")


class Packet(msgspec.Struct, Generic[Out], frozen=True):
    """All unacknowledged items, and an acknowledgement of the other direction."""

    first: int
    """Number of the first item."""
    items: tuple[Out, ...]
    ack: int
    """All items of the other side below this number were received."""


class Endpoint(Generic[Out, In]):
    """One side of a link. Transmit what `packet` returns whenever something changed, and at `next_wake`."""

    def __init__(self, *, resend_s: float, silent_s: float, now: float) -> None:
        self._resend_s = resend_s
        self._silent_s = silent_s
        self._first = 0
        self._unacknowledged: list[Out] = []
        self._sent = 0
        """Number of unacknowledged items that were transmitted at least once."""
        self._sent_at = now
        self._taken = 0
        self._owes_ack = False
        self._heard_at = now

    def send(self, items: "list[Out] | tuple[Out, ...]", now: float) -> None:
        """Queue items for the other side."""
        if items and not self._unacknowledged:
            # Silence counts from when an answer is due, not from the last packet of an idle link.
            self._heard_at = now
        self._unacknowledged.extend(items)

    def packet(self, now: float) -> Packet[Out] | None:
        """Packet to transmit now: new items, resends that are due, or a bare acknowledgement; None if there is none."""
        fresh = self._sent < len(self._unacknowledged)
        again = bool(self._unacknowledged) and now >= self._sent_at + self._resend_s
        if not (fresh or again or self._owes_ack):
            return None
        self._sent = len(self._unacknowledged)
        self._sent_at = now
        self._owes_ack = False
        return Packet(self._first, tuple(self._unacknowledged), self._taken)

    def receive(self, packet: Packet[In], now: float) -> list[In]:
        """Return the new items of a packet, in order; none if there is a gap before it."""
        self._heard_at = now
        acknowledged = packet.ack - self._first
        if acknowledged > 0:
            del self._unacknowledged[:acknowledged]
            self._first = packet.ack
            self._sent = max(0, self._sent - acknowledged)
        if not packet.items:
            return []
        self._owes_ack = True
        skip = self._taken - packet.first
        if skip < 0:
            return []
        new = list(packet.items[skip:])
        self._taken += len(new)
        return new

    def next_wake(self) -> float | None:
        """When to check `packet` and `dead` again if nothing else happens; None if no acknowledgement is due."""
        if not self._unacknowledged:
            return None
        return min(self._sent_at + self._resend_s, self._heard_at + self._silent_s)

    def dead(self, now: float) -> bool:
        """Whether the other side has been silent for too long although an acknowledgement is due."""
        return bool(self._unacknowledged) and now >= self._heard_at + self._silent_s
