"""Assignment of reward requests to workers: a worker never gets more than it can process at once.

A worker has a number of slots. A request takes a free slot of a worker that has its reward, or waits here; a freed
slot goes to the oldest waiting request. The queue is kept here rather than inside the workers for two reasons: the
deadline of an attempt then measures the reward function instead of the queue before it, and a request that is no
longer needed leaves at once instead of being computed for nothing.

Invariants:

- A worker holds at most as many requests as it has slots.
- While a request waits, every worker that has its reward is full.
- Of two requests that wait for the same slot, the older one gets it. A retried request keeps its age.

A worked example: one worker with one slot, and three requests.

    >>> queue = RewardQueue()
    >>> queue.join(WorkerId("reward/0"), slots=1, rewards=())
    []
    >>> [queue.ask(key, "maze") for key in ("a", "b", "c")]
    ['reward/0', None, None]
    >>> queue.forget("b")
    >>> queue.free(WorkerId("reward/0"), "a")
    'c'
"""

import heapq
from collections.abc import Sequence

from rollart.types.ids import WorkerId


class _Worker:
    __slots__ = ("held", "rewards", "slots")

    def __init__(self, slots: int, rewards: Sequence[str]) -> None:
        self.slots = slots
        self.rewards = frozenset(rewards)
        self.held: dict[str, None] = {}

    def has(self, reward: str) -> bool:
        return not self.rewards or reward in self.rewards

    @property
    def load(self) -> float:
        """Only of a worker with slots."""
        return len(self.held) / self.slots


class RewardQueue:
    """Requests by key, and the slots of the workers; see the module."""

    def __init__(self) -> None:
        self._workers: dict[WorkerId, _Worker] = {}
        self._ages: dict[str, int] = {}
        """Arrival order of requests, kept until they are forgotten."""
        self._asked = 0
        self._waiting: dict[str, None] = {}
        # Entries of requests that no longer wait are dropped when they reach the top.
        self._heaps: dict[str, list[tuple[int, str]]] = {}

    def join(self, worker: WorkerId, slots: int, rewards: Sequence[str]) -> list[str]:
        """Add a worker (`rewards` empty = all of them); returns the waiting requests assigned to it."""
        self._workers[worker] = _Worker(slots, rewards)
        given: list[str] = []
        while (key := self._next(worker)) is not None:
            given.append(key)
        return given

    def leave(self, worker: WorkerId) -> list[str]:
        """Remove a worker; returns the requests that it held."""
        known = self._workers.pop(worker, None)
        return [] if known is None else list(known.held)

    def close(self, worker: WorkerId) -> bool:
        """Assign nothing more to a worker; returns whether it holds no request."""
        known = self._workers[worker]
        known.slots = 0
        return not known.held

    def ask(self, key: str, reward: str) -> WorkerId | None:
        """Assign the request to the least loaded worker; None if it has to wait."""
        if key not in self._ages:
            self._ages[key] = self._asked
            self._asked += 1
        free = [
            (known.load, number, worker)
            for number, (worker, known) in enumerate(self._workers.items())
            if known.has(reward) and len(known.held) < known.slots
        ]
        if not free:
            self._waiting[key] = None
            heapq.heappush(self._heaps.setdefault(reward, []), (self._ages[key], key))
            return None
        worker = min(free)[2]
        self._workers[worker].held[key] = None
        return worker

    def free(self, worker: WorkerId, key: str) -> str | None:
        """Free the slot of a finished or timed-out request; returns the next request for it."""
        known = self._workers.get(worker)
        if known is None or key not in known.held:
            return None
        del known.held[key]
        return self._next(worker)

    def forget(self, key: str) -> None:
        """Drop a request that is settled or no longer needed. Its slot stays taken until `free`."""
        self._ages.pop(key, None)
        self._waiting.pop(key, None)

    def _next(self, worker: WorkerId) -> str | None:
        known = self._workers[worker]
        if len(known.held) >= known.slots:
            return None
        heads = [(*head, name) for name in self._heaps if known.has(name) and (head := self._head(name))]
        if not heads:
            return None
        _, key, reward = min(heads)
        heapq.heappop(self._heaps[reward])
        del self._waiting[key]
        known.held[key] = None
        return key

    def _head(self, reward: str) -> tuple[int, str] | None:
        heap = self._heaps[reward]
        while heap and heap[0][1] not in self._waiting:
            heapq.heappop(heap)
        return heap[0] if heap else None
