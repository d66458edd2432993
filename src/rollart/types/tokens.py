"""Tokens as opaque segments.

The controller owns the token log of every trajectory but never looks inside it. A segment is a length and a compact
payload (little-endian int32); a simulated segment has no payload. Engine and trainer see exactly these ids; nothing is
ever re-tokenised.
"""

import hashlib
from array import array
from collections.abc import Callable

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollart.types.versions import Version

TOKEN = np.dtype("<i4")
LOGPROB = np.dtype("<f4")


class Segment(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A run of tokens. `payload` is absent in simulation."""

    length: int
    payload: bytes | None = None

    @staticmethod
    def of(token_ids: "list[int] | NDArray[np.int32]") -> "Segment":
        array = np.asarray(token_ids, dtype=TOKEN)
        return Segment(int(array.size), array.tobytes())

    def ids(self) -> NDArray[np.int32]:
        if self.payload is None:
            raise ValueError("a simulated segment has a length but no tokens")
        return np.frombuffer(self.payload, dtype=TOKEN)


EMPTY = Segment(0, b"")


class VersionRun(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`length` consecutive tokens that were sampled with `version`."""

    version: Version
    length: int


def concatenate(parts: "list[Segment]") -> Segment:
    """Join adjacent segments; without payload if one of them has none."""
    length = sum(part.length for part in parts)
    payloads = [part.payload for part in parts if part.payload is not None]
    return Segment(length, b"".join(payloads) if len(payloads) == len(parts) else None)


class Generated(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Output of an engine: tokens, one log-probability each (absent in simulation), and their versions.

    The runs cover the tokens exactly and their versions never decrease.
    """

    tokens: Segment
    logprobs: bytes | None = None
    runs: tuple[VersionRun, ...] = ()

    def then(self, later: "Generated") -> "Generated":
        """Append what was sampled after this."""
        if not self.tokens.length:
            return later
        if not later.tokens.length:
            return self
        logprobs = None if self.logprobs is None or later.logprobs is None else self.logprobs + later.logprobs
        return Generated(concatenate([self.tokens, later.tokens]), logprobs, merge_runs(self.runs, later.runs))


NOTHING = Generated(EMPTY, b"", ())


def merge_runs(first: tuple[VersionRun, ...], second: tuple[VersionRun, ...]) -> tuple[VersionRun, ...]:
    """Join two adjacent lists of runs, merging at the seam if the version is the same."""
    if first and second and first[-1].version == second[0].version:
        joined = VersionRun(first[-1].version, first[-1].length + second[0].length)
        return first[:-1] + (joined,) + second[1:]  # noqa: RUF005 - once a turn, and unpacking takes twice as long
    return first + second


class PackedSequence(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Serialised form of a `TokenSequence`."""

    spans: tuple[int, ...]
    tokens: bytes | None
    logprobs: bytes | None
    runs: tuple[VersionRun, ...]


class TokenSequence:
    """The append-only token log of one sequence: context and sampled tokens in order.

    One buffer for tokens, one for log-probabilities, and the lengths of the spans between: ten thousand of these are
    open at once, for hundreds of turns. Keeps the running digest of the prefix, so that a turn can name the prefix it
    builds on without sending it. If tokens have no payload, in simulation, the length alone names it.
    """

    __slots__ = ("_hash", "_logprobs", "_runs", "_spans", "_tokens", "length", "turn_digest", "turn_length")

    def __init__(self) -> None:
        self.length = 0
        self.turn_length = 0
        """Length up to the last sampled token: the prefix that an engine holds and that the next turn names."""
        self.turn_digest = b""
        self._tokens: bytearray | None = bytearray()
        """None once any part has no payload."""
        self._logprobs: bytearray | None = bytearray()
        """For sampled tokens only."""
        self._spans = array("i", (0,))
        """Lengths of alternating context and sampled spans, starting with context."""
        self._runs: tuple[VersionRun, ...] = ()
        self._hash: hashlib.blake2b | None = None

    def append_context(self, segment: Segment) -> None:
        """Append tokens that the policy did not choose: prompt and observations."""
        if segment.length:
            self._append(segment, 0)

    def append_sampled(self, generated: Generated) -> None:
        """Append tokens that the policy sampled."""
        if not generated.tokens.length:
            return
        self._append(generated.tokens, 1)
        self._runs = merge_runs(self._runs, generated.runs)
        if generated.logprobs is None:
            self._logprobs = None
        elif self._logprobs is not None:
            self._logprobs += generated.logprobs
        self.turn_length = self.length
        self.turn_digest = b"" if self._hash is None else self._hash.digest()

    def _append(self, segment: Segment, sampled: int) -> None:
        self.length += segment.length
        spans = self._spans
        if len(spans) % 2 == sampled:
            spans.append(segment.length)
        else:
            spans[-1] += segment.length
        if segment.payload is None:
            self._tokens = None
            return
        if self._tokens is not None:
            self._tokens += segment.payload
        if self._hash is None:
            self._hash = hashlib.blake2b(digest_size=16)
        self._hash.update(segment.payload)

    @property
    def sampled(self) -> int:
        """Number of tokens that the policy sampled."""
        return sum(self._spans[1::2])

    def since_turn(self) -> Segment:
        """Tokens appended after the last sampled one."""
        return self._cut(self.turn_length)

    def whole(self) -> Segment:
        """All tokens as one segment."""
        return self._cut(0)

    def _cut(self, start: int) -> Segment:
        tokens = self._tokens
        return Segment(self.length - start, None if tokens is None else bytes(tokens[start * TOKEN.itemsize :]))

    def action_mask(self) -> NDArray[np.bool_]:
        """True for the tokens that the policy sampled."""
        kinds = np.arange(len(self._spans)) % 2 == 1
        return np.repeat(kinds, self._spans)

    def logprobs(self) -> NDArray[np.float32]:
        """Log-probability with which each token was sampled; 0 for context tokens."""
        if self._logprobs is None:
            raise ValueError("a simulated sequence has no log-probabilities")
        out = np.zeros(self.length, dtype=LOGPROB)
        out[self.action_mask()] = np.frombuffer(self._logprobs, dtype=LOGPROB)
        return out

    def runs(self) -> tuple[VersionRun, ...]:
        """Version runs of the sampled tokens, in order."""
        return self._runs

    def pack(self) -> PackedSequence:
        """Serialise for another process; `unpack` restores an equal sequence."""
        tokens, logprobs = self._tokens, self._logprobs
        return PackedSequence(
            tuple(self._spans),
            None if tokens is None else bytes(tokens),
            None if logprobs is None else bytes(logprobs),
            self._runs,
        )

    def __reduce__(self) -> tuple[Callable[[PackedSequence], "TokenSequence"], tuple[PackedSequence]]:
        return TokenSequence.unpack, (self.pack(),)

    @classmethod
    def unpack(cls, packed: PackedSequence) -> "TokenSequence":
        """Restore by appending span by span, so that all derived state, including the digest, is the same."""
        sequence = cls()
        start = sampled = 0
        for index, length in enumerate(packed.spans):
            tokens = Segment(length, _slice(packed.tokens, start, length, TOKEN))
            if index % 2:
                sequence.append_sampled(Generated(tokens, _slice(packed.logprobs, sampled, length, LOGPROB)))
                sampled += length
            else:
                sequence.append_context(tokens)
            start += length
        sequence._runs = packed.runs
        return sequence


def _slice(data: bytes | None, start: int, length: int, item: "np.dtype[np.generic]") -> bytes | None:
    """`length` items of optional data, starting at `start`."""
    return None if data is None else data[start * item.itemsize : (start + length) * item.itemsize]


def prefix_digest(tokens: bytes) -> bytes:
    """Digest as in `TokenSequence.turn_digest` for these token bytes; engines check a session's prefix with it."""
    return hashlib.blake2b(tokens, digest_size=16).digest()
