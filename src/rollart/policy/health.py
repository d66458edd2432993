"""Retry, back-off and quarantine of parts that fail: environment slots, engines, reward calls.

A part is identified by its place (`environment/frozenlake/0#3`, `engine/H20/0`) rather than its incarnation, or by the
idempotency key of a call (rewards), so that its history survives a restart.

    healthy ──failed──► backing off ──`failures` within `window_s`──► quarantined ──until──► on probation
       ▲                    │ ▲                                          ▲    │                  │    │
       └──────succeeded─────┘ └──── fewer: wait longer each time         │    └── after          │    │
       ▲                                                                 │    `quarantines`:     │    │
       │                                                                 │    given up, for good │    │
       └───────────────────────────succeeded─────────────────────────────┼───────────────────────┘    │
                                                                         └───────────failed───────────┘

A verdict carries the time until which the caller must leave the part alone. Invariants:

- Each consecutive failure waits at least as long as the one before it, jitter aside, and never longer than the
  back-off's `max_s`. Jitter only shortens delays, so every bound computed from full delays also holds with jitter.
- On probation one failure is enough for the next, longer quarantine; work that was in flight when the quarantine began
  belongs to the same incident and is not counted again.
- A part that was given up stays given up.
- A part that succeeds after a full window without failures is healthy again; its history, quarantines included, is
  forgotten.
- The same run seed gives the same verdicts.

A worked example (back-off 1, 2, 4 … s; 3 failures within 300 s → quarantine of 60, 120 … s):

    t=0 failed → Retry(at=1)    t=1 failed → Retry(at=3)    t=3 failed → Quarantine(until=63)
    t=63 a probe fails → Quarantine(until=183); at t=183 the probe succeeds → healthy

    >>> limits = msgspec.structs.replace(ENVIRONMENT, backoff=Backoff(base_s=1.0, max_s=60.0))
    >>> book = HealthBook(limits, seed=0)
    >>> book.failed("slot", 0.0, "no image"), book.failed("slot", 1.0, "no image")
    (Retry(at=1.0, attempt=1), Retry(at=3.0, attempt=2))
    >>> book.failed("slot", 3.0, "no image")
    Quarantine(until=63.0, failures=3)

`ENVIRONMENT` itself has jitter, so slots that failed together come back one by one.

    >>> book = HealthBook(ENVIRONMENT, seed=0)
    >>> [round(book.failed(f"slot {index}", 0.0, "no image").at, 2) for index in range(4)]
    [0.7, 0.97, 0.97, 0.85]
"""

import math
from collections import deque

import msgspec

from rollart.policy.seeds import uniform
from rollart.types.errors import RequestError


class Backoff(msgspec.Struct, frozen=True, kw_only=True):
    """Exponential delays: `base_s`, `base_s`·`factor`, … up to `max_s`."""

    base_s: float
    factor: float = 2.0
    max_s: float
    jitter: float = 0.0
    """Maximum share of a delay that is removed at random, so that parts that failed together do not retry together."""

    def __post_init__(self) -> None:
        if not (0.0 <= self.base_s <= self.max_s and self.factor >= 1.0 and 0.0 <= self.jitter <= 1.0):
            raise RequestError(f"a back-off needs 0 <= base_s <= max_s, factor >= 1 and 0 <= jitter <= 1, got {self}")

    def delay(self, attempt: int, chance: float = 0.0) -> float:
        """Seconds to wait after the `attempt`-th failure (from 1). `chance` in [0, 1) decides the jitter.

        >>> [Backoff(base_s=1, max_s=5).delay(attempt) for attempt in (1, 2, 3, 4)]
        [1.0, 2.0, 4.0, 5.0]
        """
        try:
            whole_s = min(self.base_s * self.factor ** (attempt - 1), self.max_s)
        except OverflowError:
            whole_s = self.max_s
        return whole_s * (1.0 - self.jitter * chance)


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """When to back off, for how long, and when to give up."""

    backoff: Backoff
    failures: int
    """Failures within `window_s` after which retries end."""
    window_s: float
    in_a_row: float = math.inf
    """Consecutive failures, over any span of time, after which retries end."""
    quarantine: Backoff = Backoff(base_s=60.0, max_s=1800.0)
    quarantines: int = 0
    """Quarantines before a part is given up; 0 = it is given up instead of being quarantined."""

    def __post_init__(self) -> None:
        if self.failures < 1 or self.quarantines < 0 or not self.window_s > 0.0:
            raise RequestError(f"health limits need failures >= 1, quarantines >= 0 and window_s > 0, got {self}")


ENVIRONMENT = Limits(
    backoff=Backoff(base_s=1.0, max_s=60.0, jitter=0.5),
    failures=3,
    window_s=300.0,
    quarantine=Backoff(base_s=60.0, max_s=300.0),
    quarantines=1_000_000,
)
"""Slots of environment workers: retried with back-off, then quarantined for longer each time, up to five minutes. Never
removed: an environment with occasional failures would lose all its slots, one by one, in a long run."""

ENGINE = Limits(backoff=Backoff(base_s=1.0, max_s=30.0), failures=2, window_s=600.0, in_a_row=2)
"""Engines: restarted in place; removed if the failure repeats within ten minutes, or before the engine has served again
(a start may take longer than the window)."""

WORKER = Limits(backoff=Backoff(base_s=1.0, max_s=60.0), failures=6, window_s=600.0, in_a_row=6)
"""Environment, reward and trainer workers: restarted; given up after six deaths in ten minutes, or six in a row without
any completed work."""

REWARD = Limits(backoff=Backoff(base_s=0.5, max_s=30.0, jitter=0.5), failures=5, window_s=math.inf)
"""One reward request, by idempotency key: up to five attempts, then the trajectory is `reward_failed`."""


class Retry(msgspec.Struct, frozen=True):
    """Retry at `at` or later. `attempt` counts consecutive failures."""

    at: float
    attempt: int


class Quarantine(msgspec.Struct, frozen=True):
    """No work until `until`, then one probe. `failures` is the number of failures that led to it."""

    until: float
    failures: int


class GiveUp(msgspec.Struct, frozen=True):
    """Remove the part for good; `reason` is that of the last failure."""

    reason: str


Verdict = Retry | Quarantine | GiveUp


class _Part:
    """History of a part that failed."""

    __slots__ = ("failed_at", "given_up", "in_a_row", "quarantine", "quarantines", "recent")

    def __init__(self) -> None:
        self.in_a_row = 0
        self.recent: deque[float] = deque()
        """Times of the failures since the last quarantine, oldest first; at most `Limits.failures`."""
        self.failed_at = 0.0
        self.quarantines = 0
        self.quarantine: Quarantine | None = None
        """The current quarantine or, once it is over, the one that the part is on probation from."""
        self.given_up: GiveUp | None = None


class HealthBook:
    """Health of all parts of one kind. Parts without failures take no memory."""

    def __init__(self, limits: Limits, seed: int) -> None:
        self._limits = limits
        self._seed = seed
        """Seed of the run, from which jitter is drawn."""
        self._parts: dict[str, _Part] = {}

    def failed(self, part: str, now: float, reason: str) -> Verdict:
        """Record a failure and decide what to do."""
        limits = self._limits
        known = self._parts.setdefault(part, _Part())
        if known.given_up is not None:
            return known.given_up
        on_probation = known.quarantine is not None
        if known.quarantine is not None and now < known.quarantine.until:
            return known.quarantine
        known.failed_at = now
        known.in_a_row += 1
        known.recent.append(now)
        while now - known.recent[0] >= limits.window_s:
            known.recent.popleft()
        chance = uniform(self._seed, part, known.in_a_row)
        if not on_probation and len(known.recent) < limits.failures and known.in_a_row < limits.in_a_row:
            return Retry(now + limits.backoff.delay(known.in_a_row, chance), known.in_a_row)
        if known.quarantines >= limits.quarantines:
            known.given_up = GiveUp(reason)
            return known.given_up
        known.quarantines += 1
        until = now + limits.quarantine.delay(known.quarantines, chance)
        known.quarantine = Quarantine(until, len(known.recent))
        known.recent.clear()
        return known.quarantine

    def succeeded(self, part: str, now: float) -> None:
        """Record a success. Late results of a quarantined or given-up part change nothing."""
        known = self._parts.get(part)
        if known is None or known.given_up is not None:
            return
        if known.quarantine is not None and now < known.quarantine.until:
            return
        known.in_a_row = 0
        known.quarantine = None
        if now - known.failed_at >= self._limits.window_s:
            del self._parts[part]

    def forget(self, part: str) -> None:
        """Forget a part whose name will not return (a reward that arrived, a slot that was taken down)."""
        self._parts.pop(part, None)
