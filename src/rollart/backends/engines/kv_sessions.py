"""Sessions of the torch engine, which keeps their KV itself, and the requests that continue them.

Invariants: the first `computed` tokens of a session have KV of the version in service; up to `void` there was KV that
an update invalidated.
"""

from rollart.backends.engines.kv import Block
from rollart.backends.engines.sessions import Session, Turn
from rollart.types.ids import TrajectoryId
from rollart.types.messages import Add


class KvSession(Session):
    """A token log with a block of KV memory."""

    __slots__ = ("block", "edits", "shared_keys", "void")
    turn: "KvTurn | None"

    def __init__(self, id: TrajectoryId) -> None:
        super().__init__(id)
        self.block: Block | None = None
        self.void = 0
        self.edits = 0
        """Number of times that tokens were removed; a remembered common prefix is checked against it."""
        self.shared_keys: list[tuple[int, int]] = []
        """(length, hash) of the prefixes by which other sessions find this one, shortest first."""

    @property
    def shared_length(self) -> int:
        return self.shared_keys[-1][0] if self.shared_keys else 0

    def cut(self, length: int) -> None:
        if length < self.length:
            self.edits += 1
        super().cut(length)
        self.void = min(self.void, length)

    def void_kv(self) -> None:
        """Invalidate all KV: the weights changed."""
        self.void = max(self.void, self.computed)
        self.computed = 0

    def lose_kv(self) -> None:
        self.block = None
        self.computed = self.void = 0

    def common(self, other: "KvSession") -> int:
        """Length of the longest common prefix."""
        length = min(self.length, other.length)
        differ = self._tokens[:length] != other._tokens[:length]
        first = int(differ.argmax()) if length else 0
        return first if length and differ[first] else length

    def begins_like(self, other: "KvSession", length: int) -> bool:
        """Whether the first `length` tokens are the same. Cheaper than `common`: most pairs differ."""
        if length > min(self.length, other.length):
            return False
        return self._tokens[:length].tobytes() == other._tokens[:length].tobytes()


class KvTurn(Turn):
    """A request that may take KV from another session, the donor."""

    __slots__ = ("_counted", "donor", "donor_edits", "number", "seeks_donor", "shared")
    session: KvSession

    def __init__(self, add: Add, session: KvSession) -> None:
        super().__init__(add, session)
        self.number = 0
        """Position in the order of admission, from 1; 0 while it is queued."""
        self.seeks_donor = False
        """Whether another session may hold KV of the same tokens."""
        self.donor: KvSession | None = None
        self.donor_edits = 0
        self.shared = 0
        """Number of tokens that the donor has, or will have, KV of."""
        self._counted = 0

    def begin(self) -> None:
        """Start to run: KV held at this point was not computed for this turn."""
        self.cached = self._counted = self.session.computed
        self.seeks_donor = True

    def count_copied(self, length: int) -> int:
        """Count KV of the first `length` tokens as copied; return how many prompt tokens that saved."""
        copied = max(0, min(length, self.prompt_length) - self._counted)
        self.cached += copied
        self._counted = max(self._counted, length)
        return copied

    def count_computed(self, start: int, stop: int) -> int:
        """Count KV of these positions as computed; return how many of them an update had invalidated."""
        again = max(0, min(stop, self.session.void) - start)
        self.recomputed += again
        first = max(start, self.session.void, self._counted)
        self.prefilled += max(0, min(stop, self.prompt_length) - first)
        self._counted = max(self._counted, stop)
        return again
