"""What must not be kept: matches of configured patterns, and secrets, in the texts that the run folder keeps.

    >>> redactor = Redactor(["key-[0-9]+"], ["hunter2"])
    >>> redactor.text("use key-17, or hunter2")
    'use [redacted], or [redacted]'

Reward functions and training see the whole text: this is about what is stored.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from rollart.types.transcript import TranscriptTurn, pack, unpack

REDACTED = "[redacted]"


class Redactor:
    """Removes matches of patterns, and of secrets as they are."""

    def __init__(self, patterns: Iterable[str] = (), secrets: Iterable[str] = ()) -> None:
        # Longer secrets first: one may begin with another.
        literal = [re.escape(secret) for secret in sorted(secrets, key=len, reverse=True)]
        parts = [f"(?:{pattern})" for pattern in [*literal, *patterns]]
        self._pattern = re.compile("|".join(parts)) if parts else None

    def text(self, text: str) -> str:
        return text if self._pattern is None else self._pattern.sub(REDACTED, text)

    def packed(self, transcript: bytes) -> bytes:
        """A packed transcript without them; one that cannot be read is left out as a whole."""
        if self._pattern is None or not transcript:
            return transcript
        try:
            whole = unpack(transcript)
        except ValueError:
            return b""
        return pack(
            msgspec.structs.replace(
                whole,
                prompt=self._data(whole.prompt),
                turns=tuple([self._turn(turn) for turn in whole.turns]),
                final_observation=self.text(whole.final_observation),
                artifact=self._bytes(whole.artifact),
            )
        )

    def tokens(self, texts: Sequence[str]) -> list[bool]:
        """Which tokens are part of a match in their joined text."""
        hidden = [False] * len(texts)
        if self._pattern is None:
            return hidden
        matches = [match.span() for match in self._pattern.finditer("".join(texts))]
        start = 0
        for index, text in enumerate(texts):
            end = start + len(text)
            hidden[index] = any(start < past and first < max(end, start + 1) for first, past in matches)
            start = end
        return hidden

    def _turn(self, turn: TranscriptTurn) -> TranscriptTurn:
        return msgspec.structs.replace(
            turn, observation=self.text(turn.observation), action=self.text(turn.action), state=self.text(turn.state)
        )

    def _bytes(self, data: bytes) -> bytes:
        return self.text(data.decode(errors="surrogateescape")).encode(errors="surrogateescape")

    def _data(self, value: Any) -> Any:
        match value:
            case str():
                return self.text(value)
            case bytes():
                return self._bytes(value)
            case dict():
                return {self._data(key): self._data(entry) for key, entry in value.items()}
            case list() | tuple():
                return [self._data(entry) for entry in value]
        return value


KEEP_ALL = Redactor()
