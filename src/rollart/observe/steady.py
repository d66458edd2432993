"""The steady part of a run: from its first trained step to the last one before a new group was opened."""

import msgspec

from rollart.types import journal as j


class Steady(msgspec.Struct):
    """Shares of the time from the first trained step to the last one before a new group was opened.

    This excludes start-up and the end of a run, when the last batches are trained and engines have nothing to do.
    """

    seconds: float = 0.0
    suspended: float = 0.0
    """No engine took a step because of weight syncs."""
    busy: dict[str, float] = {}
    """Per pool; an engine is busy while it has requests."""
    stepping: dict[str, float] = {}
    """Time in steps, as measured by engines; pools that do not report it are left out."""
    recompute: dict[str, float] = {}
    """Part of `stepping` spent on KV invalidated by updates."""


class _PoolSeconds(msgspec.Struct, array_like=True):
    total: float = 0.0
    busy: float = 0.0
    stepping: float = 0.0
    recompute: float = 0.0


class Period(msgspec.Struct, array_like=True):
    """A period of a run, and the use of its workers' time."""

    seconds: float = 0.0
    suspended: float = 0.0
    pools: dict[str, _PoolSeconds] = {}

    def add_pool(self, event: j.PoolTime) -> None:
        busy_s = event.seconds.get(j.TimeUse.BUSY, 0.0)
        self._add_pool(event.pool, sum(event.seconds.values()), busy_s, event.stepping_s, event.recompute_s)

    def add(self, other: "Period") -> None:
        self.seconds += other.seconds
        self.suspended += other.suspended
        for pool, spent in other.pools.items():
            self._add_pool(pool, spent.total, spent.busy, spent.stepping, spent.recompute)

    def _add_pool(self, pool: str, total: float, busy: float, stepping: float, recompute: float) -> None:
        spent = self.pools.setdefault(pool, _PoolSeconds())
        spent.total += total
        spent.busy += busy
        spent.stepping += stepping
        spent.recompute += recompute

    def shares(self) -> Steady:
        if not self.seconds:
            return Steady()
        steady = Steady(self.seconds, self.suspended / self.seconds)
        for pool, spent in sorted(self.pools.items()):
            if not spent.total:
                continue
            steady.busy[pool] = spent.busy / spent.total
            if spent.stepping:
                steady.stepping[pool] = spent.stepping / spent.total
                steady.recompute[pool] = spent.recompute / spent.total
        return steady
