"""When to send requests to a service: back-pressure, circuit breaker, hedging and back-off.

State machines without a clock or a task: `remote_client` passes in the time. All of them only delay or repeat requests;
what becomes of a call is decided elsewhere.
"""

import math
from collections import deque

RECENT = 256
"""Number of latencies from which lateness is judged."""
MIN_KNOWN = 20
LATE = 0.95
HEDGE_SHARE = 0.1
"""Maximum share of requests that are hedged."""
MAX_HEDGE_CREDIT = 5.0
MIN_HEDGE_S = 0.02


class Pace:
    """Number of concurrent requests that a service can take: lowered to those that it did not refuse, raised while
    it answers.

    >>> pace = Pace(8)
    >>> pace.busy(10.0, retry_after_s=3.0, others=5)     # five others are in flight, so it can take five
    >>> pace.limit, pace.resumes_at
    (5, -inf)
    >>> for _ in range(12): pace.answered()
    >>> pace.limit
    7
    >>> pace.busy(20.0, retry_after_s=3.0, others=0)     # it refuses a request that is alone: it takes none at all
    >>> pace.limit, pace.resumes_at
    (1, 23.0)
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._limit = float(slots)
        self.resumes_at = -math.inf
        """No request before this time."""

    @property
    def limit(self) -> int:
        return int(self._limit)

    def busy(self, now: float, retry_after_s: float, others: int) -> None:
        """Record that a request was refused for `retry_after_s` seconds while `others` requests were in flight."""
        self._limit = max(1.0, min(self._limit, float(others)))
        if not others:
            self.resumes_at = max(self.resumes_at, now + retry_after_s)

    def answered(self) -> None:
        self._limit = min(float(self._slots), self._limit + 1.0 / self._limit)


class Breaker:
    """Stops requests to a service that is out of reach, and probes it with one at a time.

        closed ──`FAILURES` in a row──► open ──after a while──► probing ──answered──► closed
                                         ▲                         │
                                         └──────── failed ─────────┘ twice as long

    >>> breaker = Breaker()
    >>> for _ in range(Breaker.FAILURES): breaker.failed(0.0)
    >>> breaker.opens_at
    1.0
    >>> breaker.sent(), breaker.opens_at                 # the probe
    (True, inf)
    >>> breaker.failed(1.5); breaker.opens_at            # a request from before it
    inf
    >>> breaker.failed(2.0, probe=True); breaker.opens_at
    4.0
    >>> breaker.sent(); breaker.answered(); breaker.opens_at
    True
    -inf
    """

    FAILURES = 10
    FIRST_S = 1.0
    LONGEST_S = 30.0

    def __init__(self) -> None:
        self._failures = 0
        self._wait_s = self.FIRST_S
        self._until: float | None = None
        self._probing = False

    @property
    def closed(self) -> bool:
        return self._until is None

    @property
    def opens_at(self) -> float:
        """When the next request may be sent; infinite while a probe is under way."""
        if self._until is None:
            return -math.inf
        return math.inf if self._probing else self._until

    def sent(self) -> bool:
        """Record a request; whether it is the probe."""
        self._probing = self._until is not None
        return self._probing

    def answered(self) -> None:
        """The service works, whatever it answered."""
        self._failures, self._wait_s, self._until, self._probing = 0, self.FIRST_S, None, False

    def failed(self, now: float, *, probe: bool = False) -> None:
        """The service failed a request, or was out of reach; those from before the probe say nothing about it."""
        self._failures += 1
        if self._until is not None and probe:
            self._wait_s = min(2 * self._wait_s, self.LONGEST_S)
            self._until, self._probing = now + self._wait_s, False
        elif self._until is None and self._failures >= self.FAILURES:
            self._until = now + self._wait_s

    def undecided(self, *, probe: bool) -> None:
        """A request showed nothing: if it was the probe, another may be sent."""
        if probe:
            self._probing = False


class Hedging:
    """Which requests are late enough to be sent a second time, and whether that is affordable.

    >>> hedging = Hedging()
    >>> hedging.late_s() is None                               # nothing is known yet
    True
    >>> for _ in range(40): hedging.answered(0.1)
    >>> hedging.late_s(), hedging.afford(), hedging.afford()   # 40 requests earn 4 hedges
    (0.1, True, True)
    """

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._late_s: float | None = None
        self._credit = 0.0

    def late_s(self) -> float | None:
        """Time after which an answer is late; None if too little is known."""
        return self._late_s

    def answered(self, seconds: float) -> None:
        self._recent.append(seconds)
        self._credit = min(self._credit + HEDGE_SHARE, MAX_HEDGE_CREDIT)
        known = len(self._recent)
        if known >= MIN_KNOWN and (known < 2 * MIN_KNOWN or known % 8 == 0):
            self._late_s = max(MIN_HEDGE_S, sorted(self._recent)[min(known - 1, int(LATE * known))])

    def afford(self) -> bool:
        """Take the credit of one hedge, if there is enough."""
        if self._credit < 1.0:
            return False
        self._credit -= 1.0
        return True


def backoff_s(attempt: int, chance: float) -> float:
    """Delay before a call is sent again after its `attempt`-th failure; `chance` in [0, 1) is the jitter.

    >>> [round(backoff_s(attempt, 0.5), 2) for attempt in (1, 2, 3, 9)]
    [0.15, 0.3, 0.6, 3.75]
    """
    return float(min(0.2 * 2 ** (attempt - 1), 5.0)) * (0.5 + chance / 2)
