"""Codec of a few words, so that a model with random weights calls tools by chance and can learn from it."""

import re
from collections.abc import Sequence

COUNTRIES = {"Peru": "Lima", "Japan": "Tokyo", "Egypt": "Cairo"}
WORDS = [*(f"capital: {country}\n" for country in COUNTRIES), *COUNTRIES, *COUNTRIES.values()]
END, START, YOURS = range(len(WORDS), len(WORDS) + 3)
_WORD = re.compile("|".join(re.escape(word) for word in WORDS))


class Words:
    stop_tokens: tuple[int, ...] = (END,)
    vocabulary = len(WORDS) + 3

    def render(self, observation: str, first: bool) -> list[int]:
        """The words that it knows."""
        return [*([START] if first else []), *map(WORDS.index, _WORD.findall(observation)), YOURS]

    def text(self, action: Sequence[int]) -> str:
        return "".join(WORDS[token] for token in action if token < len(WORDS))
