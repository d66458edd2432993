"""A trajectory's tokens in an engine, the KV that is held for them, and the request that goes on with them.

What holds: a session holds exactly the tokens that the controller sent and was sent, in order. The first `computed` of
them have KV of the version in service; up to `void` there was KV that an update made worthless.
"""

import numpy as np
from numpy.typing import NDArray

from rollart.backends.engines.kv import Block
from rollart.types.ids import RequestId, TrajectoryId
from rollart.types.messages import Add, FinishReason, Sampling, TurnDone, TurnUsage
from rollart.types.tokens import LOGPROB, TOKEN, Generated, Segment, VersionRun, prefix_digest
from rollart.types.versions import Version


class Session:
    """The tokens of one trajectory."""

    __slots__ = ("_tokens", "block", "computed", "edits", "id", "length", "shared_keys", "turn", "void")

    def __init__(self, id: TrajectoryId) -> None:
        self.id = id
        self._tokens: NDArray[np.int32] = np.empty(64, dtype=TOKEN)
        self.length = 0
        self.block: Block | None = None
        self.computed = 0
        self.void = 0
        self.turn: Turn | None = None
        """Its request, running or queued."""
        self.edits = 0
        """How often tokens were taken back: who remembers a common prefix looks at this."""
        self.shared_keys: list[tuple[int, int]] = []
        """How many of its first tokens others find it by, and their hash, the fewest first."""

    @property
    def shared_length(self) -> int:
        return self.shared_keys[-1][0] if self.shared_keys else 0

    def tokens(self, start: int = 0, stop: int | None = None) -> NDArray[np.int32]:
        """A view; it changes with the session."""
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
        return length <= self.length and prefix_digest(self._tokens[:length].tobytes()) == digest

    def cut(self, length: int) -> None:
        """Back to the first `length` tokens."""
        if length < self.length:
            self.edits += 1
        self.length = length
        self.computed = min(self.computed, length)
        self.void = min(self.void, length)

    def void_kv(self) -> None:
        """An update came: all KV has to be computed again."""
        self.void = max(self.void, self.computed)
        self.computed = 0

    def lose_kv(self) -> None:
        self.block = None
        self.computed = self.void = 0

    def common(self, other: "Session") -> int:
        """How many tokens from the start are the same in both."""
        length = min(self.length, other.length)
        differ = self._tokens[:length] != other._tokens[:length]
        first = int(differ.argmax()) if length else 0
        return first if length and differ[first] else length

    def begins_like(self, other: "Session", length: int) -> bool:
        """Whether both have so many tokens, and the same ones. Most pairs differ, and this says so at once."""
        if length > min(self.length, other.length):
            return False
        return self._tokens[:length].tobytes() == other._tokens[:length].tobytes()


class Turn:
    """A request, from its arrival to its end."""

    __slots__ = (
        "_cached",
        "_counted",
        "_logprobs",
        "_prefilled",
        "_recomputed",
        "_runs",
        "_unreported",
        "donor",
        "donor_edits",
        "number",
        "prompt_length",
        "request",
        "sampled",
        "sampling",
        "seeks_donor",
        "session",
        "shared",
        "task",
    )

    def __init__(self, add: Add, session: Session) -> None:
        self.request: RequestId = add.request
        self.task: str = add.task
        self.sampling: Sampling = add.sampling
        self.session = session
        self.prompt_length = session.length
        self.sampled = 0
        self.number = 0
        """In the order in which requests began to run."""
        self.seeks_donor = False
        """Whether another session may hold KV of the same tokens."""
        self.donor: Session | None = None
        self.donor_edits = 0
        self.shared = 0
        """How many tokens the donor has, or will have, KV of."""
        self._unreported: list[int] = []
        self._logprobs: list[float] = []
        self._runs: list[tuple[Version, int]] = []
        self._prefilled = 0
        self._cached = 0
        self._recomputed = 0
        self._counted = 0

    # --- what it costs

    def begin(self) -> None:
        """What is held at the start was not computed for this turn."""
        self._cached = self._counted = self.session.computed
        self.seeks_donor = True

    def count_copied(self, length: int) -> int:
        """KV of the first `length` tokens came from another session; how many of them this turn had waited for."""
        copied = max(0, min(length, self.prompt_length) - self._counted)
        self._cached += copied
        self._counted = max(self._counted, length)
        return copied

    def count_computed(self, start: int, stop: int) -> int:
        """KV of these positions was computed; how many of them had been computed before and were void."""
        again = max(0, min(stop, self.session.void) - start)
        self._recomputed += again
        first = max(start, self.session.void, self._counted)
        self._prefilled += max(0, min(stop, self.prompt_length) - first)
        self._counted = max(self._counted, stop)
        return again

    # --- what it gives

    def take_token(self, token: int, logprob: float, version: Version) -> None:
        self.session.append_one(token)
        self.sampled += 1
        self._unreported.append(token)
        self._logprobs.append(logprob)
        if self._runs and self._runs[-1][0] == version:
            self._runs[-1] = (version, self._runs[-1][1] + 1)
        else:
            self._runs.append((version, 1))

    @property
    def has_news(self) -> bool:
        return bool(self._unreported)

    def report(self) -> Generated:
        """What was sampled since the last report."""
        generated = Generated(
            Segment.of(self._unreported),
            np.array(self._logprobs, dtype=LOGPROB).tobytes(),
            tuple(VersionRun(version, length) for version, length in self._runs),
        )
        self._unreported, self._logprobs, self._runs = [], [], []
        return generated

    def done(self, finish: FinishReason) -> TurnDone:
        usage = TurnUsage(self._prefilled, self._cached, self._recomputed)
        return TurnDone(self.request, self.report(), finish, usage)
