"""Where the time of every pool went: busy, or idle for a named cause.

Worker-seconds are conserved: for every pool the causes add up to capacity × time. An idle engine is attributed to the
one thing that would have given it work:

    weight_sync   rollout is suspended for an update
    barrier       somebody's turn is over, but the batch takes its turns together
    environment   more could start, but every environment is busy: the agents are in their environments
    tail          nothing more may start before the next batch is whole, and its last trajectories are elsewhere
    reward        the episodes are over, their rewards are not
    training      the next batch is whole, or all of it is with the trainer: rollout may not run further ahead
    no_work       none of these: start-up and the end of the run
"""

from rollart.types.journal import PoolTime


class _Pool:
    __slots__ = ("busy", "busy_s", "capacity", "causes", "idle_s", "recompute_s", "since", "state", "stepping_s")

    def __init__(self, now: float) -> None:
        self.capacity = 0
        self.busy = 0
        self.state = "no_work"
        self.since = now
        self.busy_s = 0.0
        self.idle_s = 0.0
        """For the cause that is `state`."""
        self.causes: dict[str, float] = {}
        """For the others."""
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

    def idle_for(self, cause: str, now: float) -> None:
        """From here on, idle time has this cause."""
        if self.state != cause:
            self.settle(now)
            self.causes[self.state] = self.idle_s
            self.state = cause
            self.idle_s = self.causes.pop(cause, 0.0)

    def take(self, name: str, now: float) -> PoolTime:
        """The seconds so far, by cause; those that are none left out."""
        seconds = {"busy": self.busy_s, self.state: self.idle_s, **self.causes}
        spent = {cause: spent_s for cause, spent_s in seconds.items() if spent_s}
        taken = PoolTime(now, name, spent, self.stepping_s, self.recompute_s)
        self.busy_s = self.idle_s = self.stepping_s = self.recompute_s = 0.0
        self.causes = {}
        return taken


class Accounts:
    """Counters that the control plane moves, and the time attributed to them."""

    def __init__(self) -> None:
        self._engines: dict[str, _Pool] = {}
        self._others: dict[str, _Pool] = {}
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
        """What an engine says that its steps took, and what of that went into void KV."""
        entry = self._engines[pool]
        entry.stepping_s += stepping_s
        entry.recompute_s += recompute_s

    def busy(self, pool: str, change: int, now: float) -> None:
        """A slot of another pool started or ended work."""
        entry = self._others.get(pool)
        if entry is not None:
            entry.settle(now)
            entry.busy += change

    def idle_for(self, pool: str, cause: str, now: float) -> None:
        """From here on, idle time of a non-engine pool has this cause."""
        entry = self._others.get(pool)
        if entry is not None:
            entry.idle_for(cause, now)

    def changed(self, now: float) -> None:
        """A counter or flag above moved: idle engines may have another cause from here on."""
        cause = self._engine_cause()
        for entry in self._engines.values():
            entry.idle_for(cause, now)

    def _engine_cause(self) -> str:
        if self.suspended:
            return "weight_sync"
        if self.at_barrier:
            return "barrier"
        if self.in_episode:
            if self.admission_open:
                return "environment"
            return "training" if self.training and self.batch_ready else "tail"
        if self.awaiting_reward:
            return "reward"
        return "training" if self.training else "no_work"

    def close_period(self, now: float) -> list[PoolTime]:
        """The time since the last call, as journal events."""
        out = []
        for pools in (self._engines, self._others):
            for name, entry in pools.items():
                entry.settle(now)
                taken = entry.take(name, now)
                if taken.seconds:
                    out.append(taken)
        return out
