"""Codecs between the text of an environment and the tokens of a policy.

Invariant: tokens are only ever appended. An observation is rendered once, an action is decoded from exactly the sampled
ids, and nothing is re-tokenised.
"""

from collections.abc import Sequence
from typing import ClassVar, Protocol

END_OF_TURN = 256
"""Stop token, with which the agent ends its turn."""
OBSERVATION_START = 257
OBSERVATION_END = 258
"""The agent's turn follows."""
EPISODE_START = 259


class Codec(Protocol):
    """Shared by all environment threads of a worker: thread-safe and stateless."""

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Tokens that end the agent's turn, for the engine's `Sampling`."""
        ...

    @property
    def vocabulary(self) -> int:
        """Vocabulary size: every id is below this."""
        ...

    def render(self, observation: str, first: bool) -> list[int]:
        """Tokens of an observation, up to the agent's turn. `first`: nothing precedes it."""
        ...

    def text(self, action: Sequence[int]) -> str:
        """Text of the agent's action."""
        ...


class ByteCodec:
    """UTF-8 bytes and four markers: needs no tokenizer, for models small enough to train on a laptop.

    >>> codec = ByteCodec()
    >>> codec.render("go", first=False)
    [257, 103, 111, 258]
    >>> codec.text([82, 256])
    'R'
    """

    stop_tokens: tuple[int, ...] = (END_OF_TURN,)
    vocabulary: int = 260

    def render(self, observation: str, first: bool) -> list[int]:
        start = [EPISODE_START] if first else []
        return [*start, OBSERVATION_START, *observation.encode(), OBSERVATION_END]

    def text(self, action: Sequence[int]) -> str:
        """Drop markers and replace invalid UTF-8: a nonsensical action is not an error."""
        return bytes(token for token in action if 0 <= token < 256).decode(errors="replace")

    def answer(self, text: str) -> list[int]:
        """Tokens of a written (not sampled) answer, with its end token."""
        return [*text.encode(), END_OF_TURN]


LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,:?\n"


class LetterCodec:
    """Capital letters, digits and some punctuation: so few tokens that even a random model produces useful output.

    >>> codec = LetterCodec()
    >>> codec.text(codec.render("Go left!", first=False))
    'GO LEFT?'
    """

    vocabulary: int = len(LETTERS) + 4
    stop_tokens: tuple[int, ...] = (len(LETTERS),)

    _IDS: ClassVar[dict[str, int]] = {letter: index for index, letter in enumerate(LETTERS)}
    _START, _END, _EPISODE = (len(LETTERS) + offset for offset in (1, 2, 3))

    def render(self, observation: str, first: bool) -> list[int]:
        """Lower case becomes upper case; characters outside the alphabet become question marks."""
        start = [self._EPISODE] if first else []
        return [*start, self._START, *self._letters(observation), self._END]

    def text(self, action: Sequence[int]) -> str:
        return "".join(LETTERS[token] for token in action if 0 <= token < len(LETTERS))

    def answer(self, text: str) -> list[int]:
        """Tokens of a written (not sampled) answer, with its end token."""
        return [*self._letters(text), self.stop_tokens[0]]

    def _letters(self, text: str) -> list[int]:
        unknown = self._IDS["?"]
        return [self._IDS.get(char, unknown) for char in text.upper()]
