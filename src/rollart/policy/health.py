"""Retry, back-off and quarantine of the parts that fail: environment slots, engines, reward calls.

A part is named by its place (`environment/frozenlake/0#3`, `engine/H20/0`), not by its incarnation, or by the
idempotency key of a call (a reward's), so that its history survives a restart.

    healthy ──failed──► backing off ──`failures` within `window_s`──► quarantined ──until──► on probation
       ▲                    │ ▲                                          ▲    │                  │    │
       └──────succeeded─────┘ └──── fewer: wait longer each time         │    └── after          │    │
       ▲                                                                 │    `quarantines`:     │    │
       │                                                                 │    given up, for good │    │
       └───────────────────────────succeeded─────────────────────────────┼───────────────────────┘    │
                                                                         └───────────failed───────────┘

What always holds:

- The n-th failure in a row waits no less than the one before it, and never longer than the back-off's `max_s`.
- A part in back-off or in quarantine is not available before the time that its verdict named, and is at that time.
- On probation one failure is enough for the next, longer quarantine; work that was under way when the quarantine began
  is part of the same incident and counts no further.
- A part that was given up is never available again.
- A part that succeeds after a whole window without failure is as good as new: its past is forgotten, quarantines too.

A worked example with `ENVIRONMENT` (back-off 1, 2, 4 … s; 3 failures within 300 s → quarantine of 60, 120 … s):

    t=0 failed → Retry(at=1)    t=1 failed → Retry(at=3)    t=3 failed → Quarantine(until=63)
    t=63 available for a probe; fails → Quarantine(until=183); at t=183 the probe succeeds → healthy

    >>> book = HealthBook(ENVIRONMENT)
    >>> [book.failed("slot", now, "no image").__class__.__name__ for now in (0.0, 1.0, 3.0)]
    ['Retry', 'Retry', 'Quarantine']
    >>> book.available("slot", 62.9), book.next_wake(3.0), book.available("slot", 63.0)
    (False, 63.0, True)
"""

import heapq
import math
from collections import deque

import msgspec

from rollart.types.errors import RequestError


class Backoff(msgspec.Struct, frozen=True, kw_only=True):
    """Exponential delays: `base_s`, `base_s`·`factor`, … up to `max_s`."""

    base_s: float
    factor: float = 2.0
    max_s: float
    jitter: float = 0.0
    """The share of a delay that chance may take off, so that what failed together does not come back together."""

    def __post_init__(self) -> None:
        if not (0.0 <= self.base_s <= self.max_s and self.factor >= 1.0 and 0.0 <= self.jitter <= 1.0):
            raise RequestError(f"a back-off needs 0 <= base_s <= max_s, factor >= 1 and 0 <= jitter <= 1, got {self}")

    def delay(self, attempt: int, uniform: float = 0.0) -> float:
        """Seconds to wait after the `attempt`-th failure (from 1). `uniform`, from [0, 1), is the caller's chance.

        >>> [Backoff(base_s=1, max_s=5).delay(attempt) for attempt in (1, 2, 3, 4)]
        [1.0, 2.0, 4.0, 5.0]
        """
        try:
            whole_s = min(self.base_s * self.factor ** (attempt - 1), self.max_s)
        except OverflowError:
            whole_s = self.max_s
        return whole_s * (1.0 - self.jitter * uniform)


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """When to wait, for how long, and when to give up."""

    backoff: Backoff
    failures: int
    """This many failures within `window_s` end the retries."""
    window_s: float
    in_a_row: float = math.inf
    """This many failures without a success between them do too, however long they take."""
    quarantine: Backoff = Backoff(base_s=60.0, max_s=1800.0)
    quarantines: int = 0
    """How many quarantines a part gets before it is given up; 0: given up instead of the first one."""

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
"""A slot of an environment worker: retried with back-off, then quarantined, longer each time, five minutes at the most.
Never removed: an environment that fails now and then would lose all its slots in a long run, one after another."""

ENGINE = Limits(backoff=Backoff(base_s=1.0, max_s=30.0), failures=2, window_s=600.0)
"""An engine's place: restarted in place; when the failure repeats within ten minutes, removed."""

WORKER = Limits(backoff=Backoff(base_s=1.0, max_s=60.0), failures=6, window_s=600.0, in_a_row=6)
"""The place of an environment, reward or trainer worker: restarted; given up at six deaths in ten minutes, or at six
without anything done between them."""

REWARD = Limits(backoff=Backoff(base_s=0.5, max_s=30.0, jitter=0.5), failures=5, window_s=math.inf)
"""One reward question, by its idempotency key: asked up to five times, then the trajectory is `reward_failed`."""


class Retry(msgspec.Struct, frozen=True):
    """Try again, at `at` or later. `attempt` counts the failures in a row."""

    at: float
    attempt: int


class Quarantine(msgspec.Struct, frozen=True):
    """No work until `until`, then one probe. `failures` is how many brought it here."""

    until: float
    failures: int


class GiveUp(msgspec.Struct, frozen=True):
    """Removed for good, with the reason of the failure that was one too many."""

    reason: str


Verdict = Retry | Quarantine | GiveUp


class _Part:
    """The past of a part that failed."""

    __slots__ = ("available_at", "failed_at", "given_up", "in_a_row", "probing", "quarantine", "quarantines", "recent")

    def __init__(self) -> None:
        self.in_a_row = 0
        self.recent: deque[float] = deque()
        """When it failed since the last quarantine, oldest first; never more than `Limits.failures`."""
        self.failed_at = 0.0
        self.available_at = 0.0
        self.quarantines = 0
        self.quarantine: Quarantine | None = None
        """The quarantine that it is in or, once that is over, on probation from."""
        self.probing = False
        self.given_up: GiveUp | None = None


class HealthBook:
    """The health of all parts of one kind. A part without failures takes no memory."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._parts: dict[str, _Part] = {}
        # One entry per waiting time that was ever given; those overtaken by later news are dropped when they surface.
        self._wakes: list[tuple[float, str]] = []

    def available(self, part: str, now: float) -> bool:
        """Whether the part may get work."""
        known = self._parts.get(part)
        return known is None or (known.given_up is None and not known.probing and now >= known.available_at)

    def started(self, part: str) -> None:
        """The part got work. On probation that is its one probe: it gets no more until this has ended.

        Only needed for parts that take several pieces of work at a time.
        """
        known = self._parts.get(part)
        if known is not None and known.quarantine is not None:
            known.probing = True

    def failed(self, part: str, now: float, reason: str, uniform: float = 0.0) -> Verdict:
        """The part failed; what now? `uniform` from [0, 1) spreads retries (see `Backoff.delay`)."""
        limits = self._limits
        known = self._parts.setdefault(part, _Part())
        if known.given_up is not None:
            return known.given_up
        on_probation = known.quarantine is not None
        if known.quarantine is not None and now < known.quarantine.until:
            return known.quarantine
        known.failed_at = now
        known.probing = False
        known.in_a_row += 1
        known.recent.append(now)
        while now - known.recent[0] >= limits.window_s:
            known.recent.popleft()
        if not on_probation and len(known.recent) < limits.failures and known.in_a_row < limits.in_a_row:
            self._wait(part, known, now + limits.backoff.delay(known.in_a_row, uniform))
            return Retry(known.available_at, known.in_a_row)
        if known.quarantines >= limits.quarantines:
            known.given_up = GiveUp(reason)
            return known.given_up
        known.quarantines += 1
        self._wait(part, known, now + limits.quarantine.delay(known.quarantines, uniform))
        known.quarantine = Quarantine(known.available_at, len(known.recent))
        known.recent.clear()
        return known.quarantine

    def succeeded(self, part: str, now: float) -> None:
        """The part did its work. Late news of a part in quarantine or given up changes nothing."""
        known = self._parts.get(part)
        if known is None or known.given_up is not None:
            return
        if known.quarantine is not None and now < known.quarantine.until:
            return
        known.in_a_row = 0
        known.quarantine = None
        known.probing = False
        if now - known.failed_at >= self._limits.window_s:
            del self._parts[part]

    def forget(self, part: str) -> None:
        """The part is no more and its name will not come back (a reward that arrived, a slot taken down)."""
        self._parts.pop(part, None)

    def next_wake(self, now: float) -> float | None:
        """The next time after `now` at which a part becomes available, None if there is none. `now` never goes back."""
        while self._wakes:
            at, part = self._wakes[0]
            known = self._parts.get(part)
            if at > now and known is not None and known.given_up is None and known.available_at == at:
                return at
            heapq.heappop(self._wakes)
        return None

    def _wait(self, part: str, known: _Part, until: float) -> None:
        known.available_at = until
        heapq.heappush(self._wakes, (until, part))
        if len(self._wakes) > 2 * len(self._parts) + _SLACK:
            self._wakes = [(other.available_at, name) for name, other in self._parts.items()]
            heapq.heapify(self._wakes)


_SLACK = 64
"""Overtaken entries that are not worth a clean-up."""
