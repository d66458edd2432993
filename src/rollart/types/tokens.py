"""Tokens as the controller sees them: opaque segments.

The controller owns the token log of every trajectory but never looks inside it. A segment is a length and a compact
payload (little-endian int32); a simulated segment has no payload. Engine and trainer see exactly these ids, nothing is
ever re-tokenised.
"""

import hashlib

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
    """Adjacent segments as one; without payload if one of them has none."""
    length = sum(part.length for part in parts)
    payloads = [part.payload for part in parts if part.payload is not None]
    return Segment(length, b"".join(payloads) if len(payloads) == len(parts) else None)


class Generated(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What an engine sampled: tokens, one log-probability for each (absent in simulation), and their versions.

    The runs cover the tokens exactly and their versions never go down.
    """

    tokens: Segment
    logprobs: bytes | None = None
    runs: tuple[VersionRun, ...] = ()

    def then(self, later: "Generated") -> "Generated":
        """This and what was sampled after it, as one."""
        if not self.tokens.length:
            return later
        if not later.tokens.length:
            return self
        logprobs = None if self.logprobs is None or later.logprobs is None else self.logprobs + later.logprobs
        return Generated(concatenate([self.tokens, later.tokens]), logprobs, merge_runs(self.runs, later.runs))


NOTHING = Generated(EMPTY, b"", ())


def merge_runs(first: tuple[VersionRun, ...], second: tuple[VersionRun, ...]) -> tuple[VersionRun, ...]:
    """Two adjacent lists of runs as one, joined where the version is the same."""
    if first and second and first[-1].version == second[0].version:
        joined = VersionRun(first[-1].version, first[-1].length + second[0].length)
        return (*first[:-1], joined, *second[1:])
    return first + second


class TokenSequence:
    """The append-only token log of one sequence: context and sampled segments in order.

    Keeps the running digest of the prefix, so that a turn can name the prefix it builds on without sending it.
    """

    __slots__ = ("_hash", "length", "sampled", "segments", "turn_digest", "turn_length")

    def __init__(self) -> None:
        self.segments: list[Segment | Generated] = []
        self.length = 0
        self.sampled = 0
        self._hash = hashlib.blake2b(digest_size=16)
        self.turn_length = 0
        self.turn_digest = b""

    def append_context(self, segment: Segment) -> None:
        """Tokens that the policy did not choose: prompt and observations."""
        if segment.length:
            self.segments.append(segment)
            self._grow(segment)

    def append_sampled(self, generated: Generated) -> None:
        """Tokens that the policy sampled."""
        if generated.tokens.length:
            self.segments.append(generated)
            self.sampled += generated.tokens.length
            self._grow(generated.tokens)
            # What an engine holds of the session after this turn; the next turn names it.
            self.turn_length = self.length
            self.turn_digest = self._hash.digest()

    def _grow(self, segment: Segment) -> None:
        self.length += segment.length
        if segment.payload is not None:
            self._hash.update(segment.payload)

    def since_turn(self) -> Segment:
        """What was appended after the last sampled token."""
        parts: list[Segment] = []
        for item in reversed(self.segments):
            if isinstance(item, Generated):
                break
            parts.append(item)
        return parts[0] if len(parts) == 1 else concatenate(parts[::-1])

    def whole(self) -> Segment:
        """All tokens as one segment."""
        return concatenate([item.tokens if isinstance(item, Generated) else item for item in self.segments])

    def action_mask(self) -> NDArray[np.bool_]:
        """True for the tokens that the policy sampled."""
        mask = np.zeros(self.length, dtype=np.bool_)
        start = 0
        for item in self.segments:
            if isinstance(item, Generated):
                mask[start : start + item.tokens.length] = True
                start += item.tokens.length
            else:
                start += item.length
        return mask

    def logprobs(self) -> NDArray[np.float32]:
        """The log-probability each token was sampled with; 0 for tokens of the context."""
        out = np.zeros(self.length, dtype=LOGPROB)
        start = 0
        for item in self.segments:
            if isinstance(item, Generated):
                if item.logprobs is None:
                    raise ValueError("a simulated sequence has no log-probabilities")
                out[start : start + item.tokens.length] = np.frombuffer(item.logprobs, dtype=LOGPROB)
                start += item.tokens.length
            else:
                start += item.length
        return out

    def runs(self) -> tuple[VersionRun, ...]:
        """Version runs of the sampled tokens, in order."""
        out: tuple[VersionRun, ...] = ()
        for item in self.segments:
            if isinstance(item, Generated):
                out = merge_runs(out, item.runs)
        return out


def prefix_digest(tokens: bytes) -> bytes:
    """What `TokenSequence.turn_digest` holds for these token bytes; engines check a session's prefix with it."""
    return hashlib.blake2b(tokens, digest_size=16).digest()
