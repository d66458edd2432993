"""Which sessions an engine holds, and who has to go when the KV memory is full.

What holds: a session is here while it has KV or a request, no longer; a running request keeps its block to its end, as
large as it may need, so it never waits for memory half-way; only sessions that do not run give up their KV, the one
that was used least recently first.
"""

from collections import OrderedDict
from itertools import islice

from rollart.backends.engines.kv import KvArena
from rollart.backends.engines.sessions import Session, Turn
from rollart.types.errors import InvariantBroken
from rollart.types.ids import TrajectoryId

HEAD_TOKENS = 16
"""Sessions that start with the same so many tokens are looked at for a common prefix, as are those that were asked the
same before: the members of a group, until they part."""
WORTH_TOKENS = 4
"""Fewer are not worth a copy."""
CANDIDATES = 32
"""How many sessions are looked at, the latest first: the members of a group arrive together."""


class SessionCache:
    """All sessions of an engine, the least recently used first, and the arena with their KV."""

    def __init__(self, arena: KvArena) -> None:
        self.arena = arena
        self.evicted = 0
        self._sessions: OrderedDict[TrajectoryId, Session] = OrderedDict()
        self._peers: dict[int, dict[TrajectoryId, Session]] = {}
        """By the hash of what they begin with."""

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, id: TrajectoryId) -> Session | None:
        return self._sessions.get(id)

    def open(self, id: TrajectoryId) -> Session:
        """A fresh session; what was held under this id is dropped."""
        self.drop(id)
        session = self._sessions[id] = Session(id)
        return session

    def touch(self, session: Session) -> None:
        self._sessions.move_to_end(session.id)

    def drop(self, id: TrajectoryId) -> None:
        """Forget a session; an unknown one is ignored."""
        session = self._sessions.pop(id, None)
        if session is not None:
            self._release(session)

    def settle(self, session: Session) -> None:
        """A request of this session ended: it stays if it has KV to stay for."""
        session.turn = None
        if session.block is None:
            self.drop(session.id)
        else:
            self.touch(session)

    def void_all(self) -> None:
        """The weights changed: no KV is worth anything."""
        for session in self._sessions.values():
            session.void_kv()

    def close(self) -> None:
        self._sessions.clear()
        self._peers.clear()

    # --- memory

    def reserve(self, session: Session, tokens: int, *, alone: bool) -> bool:
        """Have a block for so many tokens, with what KV there is in it; False if there is no room now.

        `alone`: nothing runs, so nothing will make room by itself; then the session's own KV is given up too.
        """
        old = session.block
        if old is not None and old.capacity >= tokens:
            return True
        new = None
        if old is not None and 2 * self.arena.used_tokens < self.arena.tokens:
            # Who has grown once grows on: with twice the room, where there is plenty, less is moved.
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

    def _evict(self, spared: Session) -> bool:
        """Take the KV of the session that waited longest; one with a queued request keeps its tokens."""
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

    def _release(self, session: Session) -> None:
        self._unshare(session, 0)
        if session.block is not None:
            self.arena.release(session.block)
        session.lose_kv()

    # --- common prefixes

    def share(self, session: Session) -> None:
        """Let others find what this session has, or will have, KV of."""
        for length in (HEAD_TOKENS, session.length):
            if length <= session.length and length > session.shared_length:
                key = hash(session.tokens(0, length).tobytes())
                session.shared_keys.append((length, key))
                self._peers.setdefault(key, {})[session.id] = session

    def cut(self, session: Session, length: int) -> None:
        """Back to the first `length` tokens."""
        self._unshare(session, length)
        session.cut(length)

    def _unshare(self, session: Session, length: int) -> None:
        """Whoever looks for more than the first `length` tokens does not find it any more."""
        while session.shared_length > length:
            _, key = session.shared_keys.pop()
            peers = self._peers.get(key, {})
            if peers.get(session.id) is session:
                del peers[session.id]
                if not peers:
                    del self._peers[key]

    def find_donor(self, turn: Turn) -> None:
        """Name the session that has, or will have before it, the most KV of this turn's tokens, if one has."""
        session = turn.session
        turn.seeks_donor = False
        turn.donor = None
        turn.shared = session.computed + WORTH_TOKENS - 1
        # The last token is computed in any case: its logits are wanted.
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

    def copy_from_donor(self, turn: Turn) -> bool:
        """Take the KV from the donor; False if it is still being computed. A donor that is gone is looked for anew."""
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

    # --- what the tests look at

    def check(self) -> None:
        """Raise `InvariantBroken` if a block is lost, doubled or too small."""
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
