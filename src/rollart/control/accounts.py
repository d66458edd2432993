"""Where the time of every pool went: busy, or idle for a named cause.

Worker-seconds are conserved: for every pool the causes add up to capacity × time. An idle engine is attributed to the
one event that would have given it work (`types.journal.TimeUse`).
"""

from collections.abc import Mapping

from rollart.types.journal import PoolTime, RewardsUsed, TimeUse
from rollart.types.reward_use import RewardUse, add_uses


class _Pool:
    __slots__ = ("busy", "busy_s", "capacity", "causes", "idle_s", "recompute_s", "since", "state", "stepping_s")

    def __init__(self, now: float) -> None:
        self.capacity = 0
        self.busy = 0
        self.state = TimeUse.NO_WORK
        self.since = now
        self.busy_s = 0.0
        self.idle_s = 0.0
        """Idle seconds of the current cause, `state`."""
        self.causes: dict[TimeUse, float] = {}
        """Idle seconds of all other causes."""
        self.stepping_s = 0.0
        self.recompute_s = 0.0

    def settle(self, now: float) -> None:
        elapsed = now - self.since
        if elapsed > 0:
            self.since = now
            busy = self.busy
            self.busy_s += elapsed * busy
            if self.capacity > busy:
                self.idle_s += elapsed * (self.capacity - busy)

    def idle_for(self, cause: TimeUse, now: float) -> None:
        """From here on, idle time has this cause."""
        if self.state is not cause:
            self.settle(now)
            self.causes[self.state] = self.idle_s
            self.state = cause
            self.idle_s = self.causes.pop(cause, 0.0)

    def take(self, name: str, now: float) -> PoolTime:
        """Seconds per cause since the last call; zeros are left out."""
        seconds = {TimeUse.BUSY: self.busy_s, self.state: self.idle_s, **self.causes}
        spent = {cause: spent_s for cause, spent_s in seconds.items() if spent_s}
        taken = PoolTime(now, name, spent, self.stepping_s, self.recompute_s)
        self.busy_s = self.idle_s = self.stepping_s = self.recompute_s = 0.0
        self.causes = {}
        return taken


class Accounts:
    """Counters updated by the control plane, and the time attributed to their states."""

    def __init__(self) -> None:
        self._engines: dict[str, _Pool] = {}
        self._others: dict[str, _Pool] = {}
        self._uses: dict[str, RewardUse] = {}
        self.in_episode = 0
        """Training episodes that have started and are not over."""
        self.at_barrier = 0
        self.awaiting_reward = 0
        self.suspended = False
        self.training = False
        self.admission_open = True
        self.batch_ready = False

    def capacity(self, pool: str, change: int, now: float, *, engines: bool) -> None:
        """Workers (or slots) joined or left a pool."""
        pools = self._engines if engines else self._others
        entry = pools.get(pool)
        if entry is None:
            entry = pools[pool] = _Pool(now)
        entry.settle(now)
        entry.capacity += change

    def engine_busy(self, pool: str, change: int, now: float) -> None:
        """An engine got its first request, or ended its last."""
        entry = self._engines[pool]
        entry.settle(now)
        entry.busy += change

    def engine_stepped(self, pool: str, stepping_s: float, recompute_s: float) -> None:
        """Add step time reported by an engine, and the part of it spent on recomputing KV after an update."""
        entry = self._engines[pool]
        entry.stepping_s += stepping_s
        entry.recompute_s += recompute_s

    def busy(self, pool: str, change: int, now: float) -> None:
        """A slot of another pool started or ended work."""
        entry = self._others.get(pool)
        if entry is not None:
            entry.settle(now)
            entry.busy += change

    def idle_for(self, pool: str, cause: TimeUse, now: float) -> None:
        """From here on, idle time of a non-engine pool has this cause."""
        entry = self._others.get(pool)
        if entry is not None:
            entry.idle_for(cause, now)

    def changed(self, now: float) -> None:
        """A counter or flag changed: re-evaluate the cause of idle engine time."""
        cause = self._engine_cause()
        for entry in self._engines.values():
            entry.idle_for(cause, now)

    def _engine_cause(self) -> TimeUse:
        if self.suspended:
            return TimeUse.WEIGHT_SYNC
        if self.at_barrier:
            return TimeUse.BARRIER
        if self.in_episode:
            if self.admission_open:
                return TimeUse.ENVIRONMENT
            return TimeUse.TRAINING if self.training and self.batch_ready else TimeUse.TAIL
        if self.awaiting_reward:
            return TimeUse.REWARD
        return TimeUse.TRAINING if self.training else TimeUse.NO_WORK

    def used(self, uses: Mapping[str, RewardUse]) -> None:
        """Count the use of reward functions that a worker reports."""
        add_uses(self._uses, uses)

    def close_period(self, now: float) -> list[PoolTime | RewardsUsed]:
        """The time and the use of reward functions since the last call, as journal events."""
        out: list[PoolTime | RewardsUsed] = []
        for pools in (self._engines, self._others):
            for name, entry in pools.items():
                entry.settle(now)
                taken = entry.take(name, now)
                if taken.seconds:
                    out.append(taken)
        if self._uses:
            out.append(RewardsUsed(now, self._uses))
            self._uses = {}
        return out
