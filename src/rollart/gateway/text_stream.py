"""Text of an answer while its tokens arrive.

Invariants:
- The pieces, joined, are the decoded answer up to the stop string that is complete first, however the tokens are cut
  into batches.
- A piece never ends within a character, nor within what may become a stop string.

>>> stream = TextStream(lambda ids: bytes(ids).decode(errors="replace"), stops=("END",))
>>> [stream.feed([104, 105, 0xC3]), stream.feed([0xA9, 69, 78]), stream.feed([111]), stream.feed([69, 78, 68, 33])]
['', 'hié', 'ENo', '']
>>> stream.stopped
True
"""

from collections.abc import Callable, Sequence

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What decoders return for the bytes of a character that is not complete."""


class TextStream:
    """Decodes one answer step by step."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()) -> None:
        """`decode` must be local: a text is that of its parts if these end between two characters."""
        self._decode = decode
        self._stops = tuple(stops)
        self._window: list[int] = []
        """The last tokens whose text was passed on, because some decoders treat the start of a text differently, and
        those after them."""
        self._passed = 0
        """Number of tokens in the window that were passed on."""
        self._held = ""
        """Text that may be the start of a stop string."""
        self.stopped = False
        """A stop string was completed; the text ends before it."""

    def feed(self, tokens: Sequence[int]) -> str:
        """The text that these tokens add."""
        if self.stopped:
            return ""
        self._window += tokens
        text = self._decode(self._window)
        if text.endswith(UNFINISHED):
            return ""
        return self._take(text)

    def finish(self) -> str:
        """The rest of the text, after the last token."""
        if self.stopped:
            return ""
        rest = self._take(self._decode(self._window))
        held, self._held = self._held, ""
        return rest + ("" if self.stopped else held)

    def _take(self, text: str) -> str:
        before = self._decode(self._window[: self._passed])
        if len(text) > len(before):  # tokens without text, such as special ones, are no start of a text
            self._window = self._window[self._passed :]
            self._passed = len(self._window)
        return self._before_stop(self._held + text[len(before) :])

    def _before_stop(self, text: str) -> str:
        """Cut at the stop string that is complete first, or hold back the longest end that one may start with."""
        found = [(place + len(stop), place) for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                self._held = text[-length:]
                return text[:-length]
        self._held = ""
        return text
