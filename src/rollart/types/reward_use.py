"""Use of reward functions: calls, latencies, and what they cost, as their workers count it.

Uses are summed over workers, over a step and over a run. Latencies are counted in buckets that grow by a fifth, so
percentiles are exact to about 10 %.

    >>> use = RewardUse(calls=2, latencies={bucket(0.010): 1, bucket(0.100): 1})
    >>> use.add(RewardUse(calls=1, cold_starts=1, latencies={bucket(2.0): 1}))
    >>> use.calls, use.cold_starts, round(use.latency_s(0.5), 2), round(use.latency_s(0.99), 1)
    (3, 1, 0.09, 2.1)
"""

import math
from collections.abc import Mapping

import msgspec

_GROWTH = math.log(1.2)
_FIRST_S = 1e-4
"""Latencies up to this one share the first bucket."""


class RewardUse(msgspec.Struct, omit_defaults=True, gc=False):
    """Use of one reward function."""

    calls: int = 0
    """Calls that were answered, with values or with a failure."""
    failed: int = 0
    """Those answered with a failure."""
    requests: int = 0
    """Requests sent over the network; one may carry several calls."""
    retries: int = 0
    """Calls sent again because the service was busy, failed or was out of reach."""
    hedges: int = 0
    """Requests sent a second time because the first was late."""
    fallbacks: int = 0
    """Calls computed in the reward worker because the service was out of reach."""
    kills: int = 0
    """Replicas (processes, actors) killed because a call exceeded its limit."""
    cold_starts: int = 0
    """Replicas that started for a call."""
    bytes_out: int = 0
    bytes_in: int = 0
    replica_s: float = 0.0
    """Seconds for which replicas were occupied."""
    cost: float = 0.0
    """`replica_s` at the configured price."""
    latencies: dict[str, int] = {}
    """Answered calls by `bucket` of the time from when the worker had them to the answer."""

    def add(self, other: "RewardUse") -> None:
        """Add another use to this one."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name, count in other.latencies.items():
            self.latencies[name] = self.latencies.get(name, 0) + count

    def latency_s(self, share: float) -> float:
        """Latency that this share of the calls did not exceed; 0 without calls."""
        left = share * sum(self.latencies.values())
        for index in sorted(map(int, self.latencies)):
            left -= self.latencies[str(index)]
            if left <= 1e-9:
                return _FIRST_S * math.exp((index - 0.5) * _GROWTH) if index else _FIRST_S
        return 0.0


_SUMS = tuple(name for name in RewardUse.__struct_fields__ if name != "latencies")


def bucket(seconds: float) -> str:
    """Name of a latency's bucket: its number, from 0 for the shortest ones. Keys of a journal are text."""
    return str(math.ceil(math.log(seconds / _FIRST_S) / _GROWTH)) if seconds > _FIRST_S else "0"


def add_uses(total: dict[str, RewardUse], uses: Mapping[str, RewardUse]) -> None:
    """Add uses by name to a total by name."""
    for name, use in uses.items():
        total.setdefault(name, RewardUse()).add(use)
