"""The watchdog of waits: no wait without an owner, a deadline and an action.

Whoever waits opens a `Wait` and closes it when what it waited for arrives. What is still open at its deadline is handed
out by `expired`, once, for its owner to act on. When nothing moves, `report` says what is waited for.

What always holds:

- Every opened wait leaves by exactly one door: `close` or `expired`.
- `expired(now)` gives all open waits with deadline <= now, by deadline and then in the order of opening.
- Memory is in the order of the waits open now, however many were opened before.

A worked example: trajectory 7 resets its environment, with 60 s for it.

    >>> watch = Watch()
    >>> wait = watch.open("trajectory 7", "reset of frozenlake/0#3", 60.0, "take a fresh environment", now=100.0)
    >>> watch.next_deadline()
    160.0
    >>> watch.report(now=112.0, limit=10)
    ['trajectory 7: reset of frozenlake/0#3, waiting for 12.0 s; in 48.0 s: take a fresh environment']
    >>> [late.owner for late in watch.expired(160.0)], watch.close(wait)
    (['trajectory 7'], False)
"""

import heapq
import math

import msgspec

from rollart.types.errors import InvariantBroken


class Wait(msgspec.Struct, frozen=True):
    """`owner` waits for `what`, and at `deadline` does `action` instead."""

    id: int
    owner: str
    what: str
    since: float
    deadline: float
    action: str


class Watch:
    """All open waits of a controller."""

    def __init__(self) -> None:
        self._open: dict[int, Wait] = {}
        # Closed waits stay in the heap until they surface or outnumber the open ones: closing is then one dict pop.
        self._heap: list[tuple[float, int]] = []
        self._opened = 0

    def __len__(self) -> int:
        """How many waits are open."""
        return len(self._open)

    def open(self, owner: str, what: str, seconds: float, action: str, now: float) -> Wait:
        """Begin to wait. `seconds` is finite and not negative, and nothing is left unsaid: that is the rule."""
        if not (owner and what and action and 0.0 <= seconds < math.inf):
            raise InvariantBroken(
                f"no wait without an owner, a deadline and an action: {owner!r} waits {seconds} s for {what!r}, "
                f"then {action!r}"
            )
        self._opened += 1
        deadline = now + seconds
        wait = Wait(self._opened, owner, what, now, deadline, action)
        self._open[wait.id] = wait
        heapq.heappush(self._heap, (deadline, wait.id))
        return wait

    def close(self, wait: Wait) -> bool:
        """Stop waiting. False if it was closed before or has expired: then its action is already under way."""
        if self._open.pop(wait.id, None) is None:
            return False
        if len(self._heap) > 2 * len(self._open) + _SLACK:
            self._heap = [(kept.deadline, kept.id) for kept in self._open.values()]
            heapq.heapify(self._heap)
        return True

    def expired(self, now: float) -> list[Wait]:
        """Take out every open wait whose deadline is `now` or earlier, in the order of deadlines."""
        late: list[Wait] = []
        heap = self._heap
        while heap and heap[0][0] <= now:
            wait = self._open.pop(heapq.heappop(heap)[1], None)
            if wait is not None:
                late.append(wait)
        return late

    def next_deadline(self) -> float | None:
        """When `expired` has to be asked next; None when nothing is waited for."""
        heap = self._heap
        while heap and heap[0][1] not in self._open:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def report(self, now: float, limit: int) -> list[str]:
        """One line for each of the `limit` waits whose deadlines come next, and one that counts the others."""
        first = heapq.nsmallest(limit, self._open.values(), key=lambda wait: (wait.deadline, wait.id))
        lines = [_line(wait, now) for wait in first]
        if len(self._open) > len(first):
            lines.append(f"… and {len(self._open) - len(first)} more waits with later deadlines")
        return lines


_SLACK = 64
"""Closed waits in the heap that are not worth a clean-up."""


def _line(wait: Wait, now: float) -> str:
    due = f"in {wait.deadline - now:.1f} s" if now < wait.deadline else f"overdue by {now - wait.deadline:.1f} s"
    return f"{wait.owner}: {wait.what}, waiting for {now - wait.since:.1f} s; {due}: {wait.action}"
