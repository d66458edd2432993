"""Detection of stop strings in the text of an answer. The text is only a view: engines exchange tokens."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer


class StopStrings:
    """Decodes with the checkpoint's own `tokenizer.json`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @staticmethod
    def of(model: str | Mapping[str, Any]) -> "StopStrings | None":
        """None for a model without a tokenizer."""
        if isinstance(model, str) and (Path(model) / "tokenizer.json").is_file():
            return StopStrings(Tokenizer.from_file(str(Path(model) / "tokenizer.json")))
        return None

    def ended(self, answer: NDArray[np.int32], strings: tuple[str, ...]) -> bool:
        """Whether the last token completed one of the strings.

        Only the end of the answer is decoded: a character is at most four bytes, and a token at least one of them.
        """
        window = 4 * max(len(string) for string in strings) + 8
        text = self._tokenizer.decode(answer[-window:].tolist(), skip_special_tokens=False)
        return any(string in text for string in strings)
