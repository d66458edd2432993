"""Redundancy: the number of members beyond `group_size` that a group of a task starts.

Measured per task: the share q of members that go missing, because they failed or were late. A group of n members with e
extra ones is short of results with probability P(e) = P[Binomial(n + e, 1 - q) < n]. An extra member costs its tokens
in every group and helps only in those that would be short without it, so one more is started while P(e) is at least
`PAYS`, up to a limit. Where nothing goes missing there is none.

    >>> [round(short_share(8, extra, 0.08), 2) for extra in range(4)]
    [0.49, 0.16, 0.04, 0.01]
    >>> extra_members(8, 0.08, limit=4, current=0)
    1

Hysteresis: a number in use is kept until P(e) falls below `KEEPS`, so that it does not flap.
"""

import math
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

PAYS = 0.25
KEEPS = 0.15
WINDOW = 256
"""Number of last members of a task that are looked at."""
EVERY = 32
"""Members between two decisions."""


def short_share(size: int, extra: int, missing: float) -> float:
    """Share of groups with fewer than `size` results if each of `size + extra` members goes missing with `missing`."""
    total = size + extra
    return math.fsum(
        math.comb(total, results) * (1 - missing) ** results * missing ** (total - results) for results in range(size)
    )


def extra_members(size: int, missing: float, *, limit: int, current: int) -> int:
    """Number of extra members that pay for themselves."""
    extra = 0
    while extra < limit and short_share(size, extra, missing) >= (KEEPS if extra < current else PAYS):
        extra += 1
    return extra


class Redundancy(NamedTuple):
    """A decision, with what it is based on."""

    extra: int
    missing: float
    """Share of members that go missing."""
    short: float
    """Share of groups that would be short of results without extra members."""


class RedundancyBook:
    """Extra members of every task; `size` and `limit` are the same for all."""

    def __init__(self, tasks: Iterable[str], size: int, limit: int) -> None:
        self._size, self._limit = size, limit
        self._recent: dict[str, deque[bool]] = {task: deque(maxlen=WINDOW) for task in tasks}
        self._seen = dict.fromkeys(self._recent, 0)
        self._extra = dict.fromkeys(self._recent, 0)

    def extra(self, task: str) -> int:
        return self._extra[task]

    def member_ended(self, task: str, *, missing: bool) -> Redundancy | None:
        """Record a member with a result, or one that failed or was late; returns a decision that changes something."""
        recent = self._recent[task]
        recent.append(missing)
        self._seen[task] += 1
        if self._seen[task] % EVERY:
            return None
        share = sum(recent) / len(recent)
        extra = extra_members(self._size, share, limit=self._limit, current=self._extra[task])
        if extra == self._extra[task]:
            return None
        self._extra[task] = extra
        return Redundancy(extra, share, short_share(self._size, 0, share))
