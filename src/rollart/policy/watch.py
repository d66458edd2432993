"""Watchdog of waits: every wait has an owner, a deadline and an action.

The owner opens a `Wait` and closes it when the expected event arrives. A wait still open at its deadline is returned by
`expired`, once, for its owner to act on. When the run stalls, `report` lists what it waits for.

Invariants:

- Every opened wait leaves in exactly one way: `close` or `expired`.
- `expired(now)` yields all open waits with deadline <= now, by deadline and then in the order of opening.
- Memory is proportional to the number of open waits, however many were opened before.

A worked example: trajectory 7 resets its environment, with a deadline of 60 s.

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

    The owner is a name, or any object whose `str` is one: the text is rendered only when it is read, which is rare. A
    frequent waiter may reopen the same `Wait` (`Watch.open`), which costs neither an allocation nor, usually, a heap
    operation.
    """

    __slots__ = ("_queued", "act", "action", "deadline", "id", "is_open", "owner", "seconds", "what")

    def __init__(self, act: "Callable[[Wait], None] | None" = None) -> None:
        self.act = act
        """Callback that carries the action out; not used by the watch."""
        self.id = 0
        """Number of its last opening, unique per watch."""
        self.owner: object = ""
        self.what = ""
        self.seconds = 0.0
        self.deadline = 0.0
        self.action = ""
        self.is_open = False
        self._queued = math.inf
        """Key of its heap entry: its deadline, or earlier if it was reopened since."""

    @property
    def since(self) -> float:
        return self.deadline - self.seconds


class Watch:
    """All open waits of a controller."""

    def __init__(self) -> None:
        # Every open wait has one valid entry here, with key `_queued`, at its deadline or earlier: a reopened wait is
        # moved only when its entry reaches the top. Entries of closed waits are dropped when they reach the top, or
        # when they outnumber the open ones. So opening and closing usually touch nothing but the wait.
        self._heap: list[tuple[float, int, Wait]] = []
        self._opened = 0
        self._open = 0

    def __len__(self) -> int:
        """Number of open waits."""
        return self._open

    def open(self, owner: object, what: str, seconds: float, action: str, now: float, wait: Wait | None = None) -> Wait:
        """Begin to wait. Owner, what and action are required; `seconds` is finite and not negative.

        `wait`: a closed wait to reopen.
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
        """Stop waiting. False if it was closed before or has expired, in which case its action is already under way."""
        if not wait.is_open:
            return False
        wait.is_open = False
        self._open -= 1
        if len(self._heap) > 2 * self._open + _SLACK:
            self._clean_up()
        return True

    def expired(self, now: float) -> Iterator[Wait]:
        """Remove and yield every open wait whose deadline is `now` or earlier, in order of deadline.

        Lazily: a wait that is closed by the action of an earlier one is not yielded.
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
        """When to call `expired` next; None if there are no open waits."""
        first = self._surface()
        return None if first is None else first.deadline

    def report(self, now: float, limit: int) -> list[str]:
        """One line for each of the `limit` waits with the earliest deadlines, and one that counts the others."""
        waits = (wait for at, _, wait in self._heap if wait.is_open and at == wait._queued)
        first = heapq.nsmallest(limit, waits, key=lambda wait: (wait.deadline, wait.id))
        lines = [_line(wait, now) for wait in first]
        if self._open > len(first):
            lines.append(f"… and {self._open - len(first)} more waits with later deadlines")
        return lines

    def _surface(self) -> Wait | None:
        """The open wait with the earliest deadline, with its entry on top of the heap."""
        heap = self._heap
        while heap:
            at, id, wait = heap[0]
            if at != wait._queued:
                heapq.heappop(heap)  # stale: it was queued again, earlier
            elif not wait.is_open:
                heapq.heappop(heap)
                wait._queued = math.inf
            elif id != wait.id:
                # Reopened since: move the entry to the current deadline.
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
"""Number of closed waits in the heap that do not justify a clean-up."""


def _line(wait: Wait, now: float) -> str:
    due = f"in {wait.deadline - now:.1f} s" if now < wait.deadline else f"overdue by {now - wait.deadline:.1f} s"
    return f"{wait.owner}: {wait.what}, waiting for {now - wait.since:.1f} s; {due}: {wait.action}"
