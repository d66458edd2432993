"""Sessions and turns of any engine: token logs, and requests that continue them.

Invariants: a session holds exactly the tokens exchanged with the controller, in order. A session has at most one turn;
the tokens of a superseded turn are still reported, but no longer belong to the session.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from rollart.types.ids import RequestId, TrajectoryId
from rollart.types.messages import Add, FinishReason, Sampling, TurnDone, TurnUsage
from rollart.types.tokens import LOGPROB, TOKEN, Generated, Segment, VersionRun, prefix_digest
from rollart.types.versions import Version


class Session:
    """The token log of one trajectory. KV of the first `computed` tokens exists, here or in the library underneath."""

    __slots__ = ("_tokens", "computed", "id", "length", "turn")

    def __init__(self, id: TrajectoryId) -> None:
        self.id = id
        self._tokens: NDArray[np.int32] = np.empty(64, dtype=TOKEN)
        self.length = 0
        self.computed = 0
        self.turn: Turn | None = None
        """Its request, running or queued; None if there is none."""

    def tokens(self, start: int = 0, stop: int | None = None) -> NDArray[np.int32]:
        """A view, valid until the session changes."""
        return self._tokens[start : self.length if stop is None else stop]

    def append(self, tokens: NDArray[np.int32]) -> None:
        end = self.length + len(tokens)
        if end > len(self._tokens):
            grown = np.empty(max(end, 2 * len(self._tokens)), dtype=TOKEN)
            grown[: self.length] = self._tokens[: self.length]
            self._tokens = grown
        self._tokens[self.length : end] = tokens
        self.length = end

    def append_one(self, token: int) -> None:
        if self.length == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.empty_like(self._tokens)])
        self._tokens[self.length] = token
        self.length += 1

    def holds(self, length: int, digest: bytes) -> bool:
        """Whether the first `length` tokens are those with this digest."""
        return length <= self.length and prefix_digest(self._tokens[:length].tobytes()) == digest

    def cut(self, length: int) -> None:
        """Keep the first `length` tokens only."""
        self.length = length
        self.computed = min(self.computed, length)


class Turn:
    """A request from arrival to end: its unreported tokens, and its cost."""

    __slots__ = (
        "_logprobs",
        "_runs",
        "_unreported",
        "cached",
        "prefilled",
        "prompt_length",
        "recomputed",
        "request",
        "sampled",
        "sampling",
        "session",
        "task",
    )

    def __init__(self, add: Add, session: Session) -> None:
        self.request: RequestId = add.request
        self.task: str = add.task
        self.sampling: Sampling = add.sampling
        self.session = session
        self.prompt_length = session.length
        self.sampled = 0
        self.prefilled = 0
        self.cached = 0
        self.recomputed = 0
        self._unreported: list[int] = []
        self._logprobs: list[float] = []
        self._runs: list[tuple[Version, int]] = []

    def take_one(self, token: int, logprob: float, version: Version) -> None:
        """Append a sampled token, to the session too: for engines whose turns cannot outlive an abort."""
        self.session.append_one(token)
        self.sampled += 1
        self._unreported.append(token)
        self._logprobs.append(logprob)
        if self._runs and self._runs[-1][0] == version:
            self._runs[-1] = (version, self._runs[-1][1] + 1)
        else:
            self._runs.append((version, 1))

    def take(self, tokens: Sequence[int], logprobs: Sequence[float], runs: Iterable[VersionRun]) -> None:
        """Append sampled tokens, to the session too unless this turn was superseded."""
        self.sampled += len(tokens)
        self._unreported += tokens
        self._logprobs += logprobs
        for run in runs:
            if self._runs and self._runs[-1][0] == run.version:
                self._runs[-1] = (run.version, self._runs[-1][1] + run.length)
            else:
                self._runs.append((run.version, run.length))
        if self.is_current:
            self.session.append(np.array(tokens, dtype=TOKEN))

    @property
    def is_current(self) -> bool:
        """Whether its session still waits for this turn."""
        return self.session.turn is self

    @property
    def has_news(self) -> bool:
        return bool(self._unreported)

    def report(self) -> Generated:
        """Return what was sampled since the last report."""
        generated = Generated(
            Segment.of(self._unreported),
            np.array(self._logprobs, dtype=LOGPROB).tobytes(),
            tuple(VersionRun(version, length) for version, length in self._runs),
        )
        self._unreported, self._logprobs, self._runs = [], [], []
        return generated

    def done(self, finish: FinishReason) -> TurnDone:
        usage = TurnUsage(self.prefilled, self.cached, self.recomputed)
        return TurnDone(self.request, self.report(), finish, usage)


class VersionedSession(Session):
    """A session whose KV is not visible here: the version of its last token tells whether an update invalidated it."""

    __slots__ = ("computed_with",)

    def __init__(self, id: TrajectoryId) -> None:
        super().__init__(id)
        self.computed_with: Version | None = None

    def mark_computed(self, version: Version) -> None:
        """KV of all tokens exists now, computed with this version."""
        self.computed, self.computed_with = self.length, version


S = TypeVar("S", bound=Session)


class Sessions(Generic[S]):
    """The sessions of an engine, by trajectory. These stay until they are dropped; see `SessionCache` for eviction."""

    def __init__(self, kind: type[S]) -> None:
        self._kind = kind
        self._sessions: OrderedDict[TrajectoryId, S] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, id: TrajectoryId) -> S | None:
        return self._sessions.get(id)

    def open(self, id: TrajectoryId) -> S:
        """Add an empty session in place of the one with this id, if any."""
        self.drop(id)
        session = self._sessions[id] = self._kind(id)
        return session

    def cut(self, session: S, length: int) -> None:
        """Keep the first `length` tokens of a session only."""
        session.cut(length)

    def settle(self, session: S) -> None:
        """Called when the turn of a session ended, and the session has no other."""

    def drop(self, id: TrajectoryId) -> None:
        """Forget a session; an unknown one is ignored."""
        self._sessions.pop(id, None)

    def close(self) -> None:
        self._sessions.clear()
