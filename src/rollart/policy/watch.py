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
from collections.abc import Callable, Iterator

from rollart.types.errors import InvariantBroken


class Wait:
    """`owner` waits for `what`, and at `deadline` does `action` instead.

    The owner is a name, or anything whose text is one: the text is made for whoever reads it, which is seldom. Whoever
    waits often may keep one and open it again (`Watch.open`): that costs neither an object nor, as a rule, a place in
    the queue of deadlines.
    """

    __slots__ = ("_queued", "act", "action", "deadline", "id", "is_open", "owner", "seconds", "what")

    def __init__(self, act: "Callable[[Wait], None] | None" = None) -> None:
        self.act = act
        """What carries the action out; not the watch's business."""
        self.id = 0
        """Counts openings."""
        self.owner: object = ""
        self.what = ""
        self.seconds = 0.0
        self.deadline = 0.0
        self.action = ""
        self.is_open = False
        self._queued = math.inf
        """Where it stands in the queue of deadlines: at its deadline or, if it was opened again since, before it."""

    @property
    def since(self) -> float:
        return self.deadline - self.seconds


class Watch:
    """All open waits of a controller."""

    def __init__(self) -> None:
        # Every open wait has one valid entry here, the one at its `_queued`, at its deadline or earlier: a wait that is
        # opened again is moved only when the entry surfaces. Entries of closed waits go when they surface, or when they
        # outnumber the open ones. So opening and closing touch nothing but the wait.
        self._heap: list[tuple[float, int, Wait]] = []
        self._opened = 0
        self._open = 0

    def __len__(self) -> int:
        """How many waits are open."""
        return self._open

    def open(self, owner: object, what: str, seconds: float, action: str, now: float, wait: Wait | None = None) -> Wait:
        """Begin to wait. `seconds` is finite and not negative, and nothing is left unsaid: that is the rule.

        `wait`: one that is not open, to be used again.
        """
        if not (owner and what and action and 0.0 <= seconds < math.inf):
            raise InvariantBroken(
                f"no wait without an owner, a deadline and an action: {str(owner)!r} waits {seconds} s for {what!r}, "
                f"then {action!r}"
            )
        if wait is None:
            wait = Wait()
        elif wait.is_open:
            raise InvariantBroken(f"{owner} waits for {what} with a wait that is still open for {wait.what}")
        self._opened += 1
        wait.id = self._opened
        wait.owner = owner
        wait.what = what
        wait.seconds = seconds
        wait.deadline = deadline = now + seconds
        wait.action = action
        wait.is_open = True
        self._open += 1
        if deadline < wait._queued:
            self._push(wait)
        return wait

    def close(self, wait: Wait) -> bool:
        """Stop waiting. False if it was closed before or has expired: then its action is already under way."""
        if not wait.is_open:
            return False
        wait.is_open = False
        self._open -= 1
        if len(self._heap) > 2 * self._open + _SLACK:
            self._clean_up()
        return True

    def expired(self, now: float) -> Iterator[Wait]:
        """Take out every open wait whose deadline is `now` or earlier, in the order of deadlines.

        One by one: what the action of one closes is not given any more.
        """
        while True:
            first = self._surface()
            if first is None or first.deadline > now:
                return
            heapq.heappop(self._heap)
            first._queued = math.inf
            first.is_open = False
            self._open -= 1
            yield first

    def next_deadline(self) -> float | None:
        """When `expired` has to be asked next; None when nothing is waited for."""
        first = self._surface()
        return None if first is None else first.deadline

    def report(self, now: float, limit: int) -> list[str]:
        """One line for each of the `limit` waits whose deadlines come next, and one that counts the others."""
        waits = (wait for at, _, wait in self._heap if wait.is_open and at == wait._queued)
        first = heapq.nsmallest(limit, waits, key=lambda wait: (wait.deadline, wait.id))
        lines = [_line(wait, now) for wait in first]
        if self._open > len(first):
            lines.append(f"… and {self._open - len(first)} more waits with later deadlines")
        return lines

    def _surface(self) -> Wait | None:
        """The open wait whose deadline comes next, with its entry on top."""
        heap = self._heap
        while heap:
            at, id, wait = heap[0]
            if at != wait._queued:
                heapq.heappop(heap)  # it was queued again, earlier
            elif not wait.is_open:
                heapq.heappop(heap)
                wait._queued = math.inf
            elif id != wait.id:
                # Opened again since: to where it belongs now.
                wait._queued = wait.deadline
                heapq.heapreplace(heap, (wait.deadline, wait.id, wait))
            else:
                return wait
        return None

    def _push(self, wait: Wait) -> None:
        wait._queued = wait.deadline
        heapq.heappush(self._heap, (wait.deadline, wait.id, wait))

    def _clean_up(self) -> None:
        heap, self._heap = self._heap, []
        kept: dict[int, Wait] = {}
        for _, _, wait in heap:
            if wait.is_open:
                kept[wait.id] = wait
            else:
                wait._queued = math.inf
        for wait in kept.values():
            wait._queued = wait.deadline
        self._heap = [(wait.deadline, wait.id, wait) for wait in kept.values()]
        heapq.heapify(self._heap)


_SLACK = 64
"""Closed waits in the heap that are not worth a clean-up."""


def _line(wait: Wait, now: float) -> str:
    due = f"in {wait.deadline - now:.1f} s" if now < wait.deadline else f"overdue by {now - wait.deadline:.1f} s"
    return f"{wait.owner}: {wait.what}, waiting for {now - wait.since:.1f} s; {due}: {wait.action}"
