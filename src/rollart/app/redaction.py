"""Redaction of the texts in the run folder: matches of configured patterns, and secrets.

    >>> redactor = Redactor(["key-[0-9]+"], ["hunter2"])
    >>> redactor.text("use key-17, or hunter2")
    'use [redacted], or [redacted]'

Invariant: every text of a transcript is redacted, whatever field it is in. Reward functions and training see the whole
text: this is about what is stored.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from rollart.types.transcript import pack, unpack

REDACTED = "[redacted]"


class Redactor:
    """Removes matches of patterns, and of secrets as they are."""

    def __init__(self, patterns: Iterable[str] = (), secrets: Iterable[str] = ()) -> None:
        # Longer secrets first: one may begin with another.
        literal = [re.escape(secret) for secret in sorted(secrets, key=len, reverse=True)]
        # One by one: joined, inline flags are errors, and backreferences count the groups of other patterns.
        self._patterns = [re.compile(pattern) for pattern in [*literal, *patterns]]

    def text(self, text: str) -> str:
        kept, start = [], 0
        for first, past in self._matches(text):
            kept += [text[start:first], REDACTED]
            start = past
        return "".join([*kept, text[start:]])

    def packed(self, transcript: bytes) -> bytes:
        """A packed transcript without them; one that cannot be read is left out as a whole."""
        if not self._patterns or not transcript:
            return transcript
        try:
            whole = unpack(transcript)
        except ValueError:
            return b""
        return pack(self._data(whole))

    def tokens(self, texts: Sequence[str]) -> list[bool]:
        """Which tokens are part of a match in their joined text."""
        hidden = [False] * len(texts)
        matches = self._matches("".join(texts))
        start = 0
        for index, text in enumerate(texts):
            end = start + len(text)
            hidden[index] = any(start < past and first < max(end, start + 1) for first, past in matches)
            start = end
        return hidden

    def _matches(self, text: str) -> list[tuple[int, int]]:
        """Spans of text that some pattern matches, in order; those that overlap are one."""
        found: list[tuple[int, int]] = []
        for first, past in sorted(match.span() for pattern in self._patterns for match in pattern.finditer(text)):
            if found and first < found[-1][1]:
                found[-1] = found[-1][0], max(past, found[-1][1])
            elif first < past:
                found.append((first, past))
        return found

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
            case list():
                return [self._data(entry) for entry in value]
            case tuple():
                return tuple([self._data(entry) for entry in value])
            case msgspec.Struct():
                fields = {name: self._data(getattr(value, name)) for name in value.__struct_fields__}
                return msgspec.structs.replace(value, **fields)
        return value


KEEP_ALL = Redactor()
