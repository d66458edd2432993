"""KV memory of a simulated engine: running requests, and prefixes of sessions between their turns.

    reserved (running requests) + idle (cached prefixes)  ≤  capacity,  always

A request reserves memory for its context and its whole answer before it starts, so nothing is evicted mid-turn. The
simulator knows the answer's length in advance; a real engine would admit more and sometimes preempt. Idle prefixes are
evicted, least recently used first, and their sessions forgotten. An update invalidates KV in place: such a session
stays known, takes no memory, and is recomputed when it continues.
"""

from rollart.types.ids import TrajectoryId


class Session:
    """A trajectory's prefix of `tokens`; void unless `epoch` is the cache's. Busy while a request runs on it.

    A session that is neither is idle: it takes memory and may be evicted.
    """

    __slots__ = ("busy", "epoch", "id", "kept", "tokens")

    def __init__(self, id: TrajectoryId) -> None:
        self.id = id
        self.tokens = 0
        self.epoch = -1
        self.busy = False
        self.kept = 0
        """Sequence number of the last `keep`: the smallest among idle sessions is the least recently used."""


class KvCache:
    __slots__ = (
        "_epoch",
        "_kept",
        "_sessions",
        "capacity_tokens",
        "idle_tokens",
        "reserved_tokens",
    )

    def __init__(self, capacity_tokens: int) -> None:
        self.capacity_tokens = capacity_tokens
        self.reserved_tokens = 0
        self.idle_tokens = 0
        self._epoch = 0
        self._kept = 0
        self._sessions: dict[TrajectoryId, Session] = {}

    def find(self, id: TrajectoryId, prefix_tokens: int) -> Session | None:
        """The session, if exactly this prefix of it is known, void or not."""
        session = self._sessions.get(id)
        if session is None or session.busy or session.tokens != prefix_tokens:
            return None
        return session

    def is_void(self, session: Session) -> bool:
        return session.epoch != self._epoch

    def reserve(self, need_tokens: int, session: Session | None) -> bool:
        """Reserve memory for a request that takes over the prefix of `session`. False: no room, and nothing changed."""
        if self.reserved_tokens + need_tokens > self.capacity_tokens:
            return False
        if session is not None:
            self._wake(session)
            session.busy = True
        self.reserved_tokens += need_tokens
        while self.reserved_tokens + self.idle_tokens > self.capacity_tokens:
            idle = (session for session in self._sessions.values() if self._is_idle(session))
            self.end(min(idle, key=lambda session: session.kept).id)
        return True

    def open(self, id: TrajectoryId) -> Session:
        """A new session that replaces any other with this id. Busy: its request has already reserved."""
        self.end(id)
        session = self._sessions[id] = Session(id)
        session.busy = True
        return session

    def keep(self, session: Session, need_tokens: int, tokens: int, *, void: bool = False) -> None:
        """A request ended: its session now holds `tokens`, unless it was ended or replaced meanwhile."""
        self.reserved_tokens -= need_tokens
        if self._sessions.get(session.id) is not session:
            return
        session.busy = False
        session.tokens = tokens
        if void:
            session.epoch = -1
        else:
            session.epoch = self._epoch
            self._kept += 1
            session.kept = self._kept
            self.idle_tokens += tokens

    def lose(self, session: Session, need_tokens: int) -> None:
        """A request ended before its context was computed: no prefix is kept."""
        self.reserved_tokens -= need_tokens
        if self._sessions.get(session.id) is session:
            del self._sessions[session.id]

    def end(self, id: TrajectoryId) -> None:
        """Forget a session; a request running on it keeps its reservation until it ends."""
        session = self._sessions.pop(id, None)
        if session is not None:
            self._wake(session)

    def void_all(self) -> None:
        """Invalidate all KV, because the weights changed."""
        self._epoch += 1
        self.idle_tokens = 0

    def _is_idle(self, session: Session) -> bool:
        return not session.busy and session.epoch == self._epoch

    def _wake(self, session: Session) -> None:
        if self._is_idle(session):
            self.idle_tokens -= session.tokens
