"""A reliable link over an unreliable exchange.

For runtimes whose workers are elsewhere. Each side numbers what it says and repeats it until the other side has
acknowledged it; each takes every item exactly once and in order. Lost, doubled, delayed and reordered packets are
invisible above: what is left is delay, or silence, after which the other side is taken for dead. Reliability lives
here and nowhere else, so everybody above may rely on it.

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
    """Everything not yet acknowledged, and an acknowledgement of the other direction."""

    first: int
    """Number of the first item."""
    items: tuple[Out, ...]
    ack: int
    """All items of the other side below this number have been taken."""


class Endpoint(Generic[Out, In]):
    """One side of a link. Transmit what `packet` gives, whenever something changed or `next_wake` says so."""

    def __init__(self, *, resend_s: float, silent_s: float, now: float) -> None:
        self._resend_s = resend_s
        self._silent_s = silent_s
        self._first = 0
        self._unacknowledged: list[Out] = []
        self._sent = 0
        """How many of the unacknowledged items have been transmitted at least once."""
        self._sent_at = now
        self._taken = 0
        self._owes_ack = False
        self._heard_at = now

    def send(self, items: "list[Out] | tuple[Out, ...]", now: float) -> None:
        """Queue items for the other side."""
        if items and not self._unacknowledged:
            # Silence is counted from when an answer is due, not from the last word of a link that had nothing to say.
            self._heard_at = now
        self._unacknowledged.extend(items)

    def packet(self, now: float) -> Packet[Out] | None:
        """What to transmit now: new items, items that are due again, or a mere acknowledgement; None if nothing is."""
        fresh = self._sent < len(self._unacknowledged)
        again = bool(self._unacknowledged) and now >= self._sent_at + self._resend_s
        if not (fresh or again or self._owes_ack):
            return None
        self._sent = len(self._unacknowledged)
        self._sent_at = now
        self._owes_ack = False
        return Packet(self._first, tuple(self._unacknowledged), self._taken)

    def receive(self, packet: Packet[In], now: float) -> list[In]:
        """The items of a packet that are new, in order. A packet after a gap gives none."""
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
        """When `packet` or `dead` has to be asked again, if nothing else happens; None while nothing is owed to us."""
        if not self._unacknowledged:
            return None
        return min(self._sent_at + self._resend_s, self._heard_at + self._silent_s)

    def dead(self, now: float) -> bool:
        """Whether the other side has been silent for too long although an acknowledgement is due."""
        return bool(self._unacknowledged) and now >= self._heard_at + self._silent_s
