"""Sessions of a torch engine, their KV memory, and eviction when it is full.

Invariants: a session is held while it has KV or a request; a running request keeps its block to its end, as large as it
may need, so it never waits for memory midway; only sessions that do not run are evicted, least recently used first.
"""

from itertools import islice

from rollart.backends.engines.kv import KvArena
from rollart.backends.engines.kv_sessions import KvSession, KvTurn
from rollart.backends.engines.sessions import Sessions
from rollart.types.errors import InvariantBroken
from rollart.types.ids import TrajectoryId

HEAD_TOKENS = 16
"""Length of the shorter prefix by which sessions find each other. The longer one is the whole prompt, which the members
of a group share until they diverge."""
WORTH_TOKENS = 4
"""Minimum number of tokens worth a copy."""
CANDIDATES = 32
"""Maximum number of sessions compared, latest first: the members of a group arrive together."""


class SessionCache(Sessions[KvSession]):
    """All sessions of a torch engine, the least recently used first, and the arena with their KV."""

    def __init__(self, arena: KvArena) -> None:
        super().__init__(KvSession)
        self.arena = arena
        self.evicted = 0
        self._peers: dict[int, dict[TrajectoryId, KvSession]] = {}
        """Sessions by the hash of a prefix."""

    def touch(self, session: KvSession) -> None:
        self._sessions.move_to_end(session.id)

    def drop(self, id: TrajectoryId) -> None:
        session = self._sessions.pop(id, None)
        if session is not None:
            self._release(session)

    def settle(self, session: KvSession) -> None:
        """Keep the session if it has KV."""
        if session.block is None:
            self.drop(session.id)
        else:
            self.touch(session)

    def void_all(self) -> None:
        """Invalidate all KV: the weights changed."""
        for session in self._sessions.values():
            session.void_kv()

    def close(self) -> None:
        super().close()
        self._peers.clear()

    # --- memory

    def reserve(self, session: KvSession, tokens: int, *, alone: bool) -> bool:
        """Give the session a block for `tokens` tokens and move its KV there; False if there is no room now.

        `alone`: nothing runs, so no memory will be freed later; then the session's own KV is dropped too.
        """
        old = session.block
        if old is not None and old.capacity >= tokens:
            return True
        new = None
        if old is not None and 2 * self.arena.used_tokens < self.arena.tokens:
            # A session that grew will grow again: doubling, if there is space, reduces the number of moves.
            new = self.arena.allocate(max(tokens, 2 * old.capacity))
        new = new or self.arena.allocate(tokens)
        while new is None and self._evict(session):
            new = self.arena.allocate(tokens)
        if new is None and alone:
            if old is None:
                raise InvariantBroken(f"no room for {tokens} tokens in an arena that holds nothing else")
            self._release(session)
            return self.reserve(session, tokens, alone=True)
        if new is None:
            return False
        if old is not None:
            self.arena.copy(old, new, 0, session.computed)
            self.arena.release(old)
        session.block = new
        return True

    def _evict(self, spared: KvSession) -> bool:
        """Evict the KV of the least recently used session; one with a queued request keeps its tokens."""
        for session in self._sessions.values():
            if session is spared or session.block is None or (session.turn is not None and session.turn.number):
                continue
            self.evicted += 1
            if session.turn is None:
                self.drop(session.id)
            else:
                self._release(session)
            return True
        return False

    def _release(self, session: KvSession) -> None:
        self._unshare(session, 0)
        if session.block is not None:
            self.arena.release(session.block)
        session.lose_kv()

    # --- common prefixes

    def share(self, session: KvSession) -> None:
        """Make this session visible to `find_donor` of other sessions."""
        for length in (HEAD_TOKENS, session.length):
            if length <= session.length and length > session.shared_length:
                key = hash(session.tokens(0, length).tobytes())
                session.shared_keys.append((length, key))
                self._peers.setdefault(key, {})[session.id] = session

    def cut(self, session: KvSession, length: int) -> None:
        self._unshare(session, length)
        super().cut(session, length)

    def _unshare(self, session: KvSession, length: int) -> None:
        """Hide all but the first `length` tokens from `find_donor`."""
        while session.shared_length > length:
            _, key = session.shared_keys.pop()
            peers = self._peers.get(key, {})
            if peers.get(session.id) is session:
                del peers[session.id]
                if not peers:
                    del self._peers[key]

    def find_donor(self, turn: KvTurn) -> None:
        """Set the turn's donor to the session that has, or will have before it, the most KV of its tokens."""
        session = turn.session
        turn.seeks_donor = False
        turn.donor = None
        turn.shared = session.computed + WORTH_TOKENS - 1
        # The last token is always computed: its logits are needed.
        wanted = session.length - 1
        for length, key in reversed(session.shared_keys):
            if length <= session.computed or turn.shared >= min(length, wanted):
                return
            for peer in islice(reversed(self._peers.get(key, {}).values()), CANDIDATES):
                if peer is session or peer.block is None:
                    continue
                other = peer.turn
                runs_before = other is not None and 0 < other.number < turn.number
                most = wanted if runs_before else min(wanted, peer.computed)
                if most > turn.shared and session.begins_like(peer, turn.shared + 1):
                    turn.donor, turn.donor_edits, turn.shared = peer, peer.edits, min(session.common(peer), most)

    def copy_from_donor(self, turn: KvTurn) -> bool:
        """Copy the donor's KV; False if it is still being computed. A donor that is gone is replaced."""
        donor, session = turn.donor, turn.session
        if donor is None:
            return True
        other = donor.turn
        computing = other is not None and 0 < other.number < turn.number
        intact = donor.block is not None and donor.edits == turn.donor_edits
        if intact and donor.computed >= turn.shared:
            if donor.block is None or session.block is None:
                raise InvariantBroken(f"session {session.id} runs without KV memory")
            self.arena.copy(donor.block, session.block, session.computed, turn.shared)
            session.computed = turn.shared
        elif intact and computing:
            return False
        else:
            self.find_donor(turn)
            return self.copy_from_donor(turn)
        turn.donor = None
        return True

    # --- for tests

    def check(self) -> None:
        """Raise `InvariantBroken` if a block is leaked, duplicated or too small."""
        self.arena.allocator.check()
        blocks = [session.block for session in self._sessions.values() if session.block is not None]
        if sum(block.capacity for block in blocks) != self.arena.used_tokens:
            raise InvariantBroken(f"{self.arena.used_tokens} tokens of KV in use, but the sessions hold {blocks}")
        for session in self._sessions.values():
            capacity = 0 if session.block is None else session.block.capacity
            if max(session.computed, session.void) > min(capacity, session.length):
                raise InvariantBroken(f"session {session.id} has more KV than tokens or memory")
            if session.block is None and session.turn is None:
                raise InvariantBroken(f"session {session.id} has neither KV nor a request")
