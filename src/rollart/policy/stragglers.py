"""Stragglers: members that run so long that it is better not to wait for them.

A member is late once it has run for longer than the patience of its task, which is measured: twice the time within
which three quarters of its recent results came, which is robust while fewer than a quarter are stragglers. Two
decisions follow, both only where a staleness bound is enforced:

- A group at its last chance waits for members that are not late, and for no others.
- A late member is replaced when half of the time from its start to the last claim of its group has passed. From then
  on it is not expected to make it: a member that has run for t takes about t more, as with any long-tailed duration.
  A fresh one has the other half, and needs less than the patience.

                 start           patience                 half             last claim (estimate)
    member  ──────┼─────────────────┼──────────────────────┼─────────────────────────┼───►
                                    late                   replaced
    fresh                                                  ┼─────────────►

Until a task has enough results there is no patience: nothing is late. Durations of members that were replaced are not
known; prompts that are slow for good are measured under the bounds of their own that they get. A group whose members
were all replaced once gives the next ones twice the patience, and so on: if everything became slower at once, members
still finish.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable

from rollart.types.ids import TrajectoryId

WINDOW = 256
"""Number of last results of a task that its patience is measured from."""
ENOUGH = 16
"""Number of results before there is a patience."""
QUANTILE = 0.75
FACTOR = 2.0
MAX_ROUNDS = 16
"""Limit of the exponent."""


class Durations:
    """Durations of the last results of one task."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []

    def add(self, seconds: float) -> None:
        self._recent.append(seconds)
        insort(self._sorted, seconds)
        if len(self._recent) > WINDOW:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]

    def patience_s(self) -> float | None:
        """How long a member may run before it is late; None while too little is known."""
        if len(self._sorted) < ENOUGH:
            return None
        return FACTOR * self._sorted[int(QUANTILE * (len(self._sorted) - 1))]


class StragglerBook:
    """The running members of all tasks: which are late, and when others will be."""

    def __init__(self, tasks: Iterable[str]) -> None:
        self._durations = {task: Durations() for task in tasks}
        self._running: dict[str, dict[TrajectoryId, float]] = {task: {} for task in self._durations}
        """Members that are not late, with the time of their start; in this order, so the next to be late is first."""
        self._late: dict[str, dict[TrajectoryId, float]] = {task: {} for task in self._durations}

    def started(self, task: str, trajectory: TrajectoryId, now: float) -> None:
        self._running[task][trajectory] = now

    def ended(self, task: str, trajectory: TrajectoryId, now: float, *, result: bool) -> bool:
        """Record the end of a member; returns whether it was late."""
        late = trajectory in self._late[task]
        began = self._late[task].pop(trajectory) if late else self._running[task].pop(trajectory)
        if result:
            self._durations[task].add(now - began)
        return late

    def patience_s(self, task: str) -> float | None:
        return self._durations[task].patience_s()

    def late(self, task: str) -> dict[TrajectoryId, float]:
        """Members that are late, with the time of their start."""
        return self._late[task]

    def check(self, now: float) -> None:
        """Find members that have become late. Call at `next_wake`."""
        for task, running in self._running.items():
            patience_s = self.patience_s(task)
            if patience_s is None:
                continue
            while running:
                trajectory, began = next(iter(running.items()))
                if began + patience_s > now:
                    break
                del running[trajectory]
                self._late[task][trajectory] = began

    def next_wake(self) -> float | None:
        """When the next member becomes late."""
        wakes = []
        for task, running in self._running.items():
            patience_s = self.patience_s(task)
            if running and patience_s is not None:
                wakes.append(next(iter(running.values())) + patience_s)
        return min(wakes, default=None)


def replace_at(began: float, last_claim_at: float, patience_s: float, rounds: int) -> float:
    """When a late member is replaced, given the estimated time of the last claim that its group can be part of.

    `rounds`: how often all members of the group were replaced.

    >>> replace_at(began=10.0, last_claim_at=14.0, patience_s=1.5, rounds=0)
    12.0
    >>> replace_at(began=10.0, last_claim_at=14.0, patience_s=1.5, rounds=2)
    16.0
    """
    return max((began + last_claim_at) / 2, began + patience_s * 2.0 ** min(rounds, MAX_ROUNDS))


class ClaimPace:
    """Estimate of when claims will be made, from the last ones."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=5)

    def claimed(self, now: float) -> None:
        self._times.append(now)

    def last_claim_at(self, claims_left: int) -> float | None:
        """Estimated time of the n-th claim from now on; None while unknown."""
        if len(self._times) < 2:
            return None
        every_s = (self._times[-1] - self._times[0]) / (len(self._times) - 1)
        return self._times[-1] + claims_left * every_s
