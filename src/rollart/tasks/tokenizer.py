"""Small tokenizer for the built-in tasks: bytes, the words of the tasks' own texts, and three markers.

    <|user|>Guess my number in 6 guesses.↵29-91<|agent|>60<|end|><|user|>lower 29-59<|agent|>…

Invariants:
- Every text can be tokenised, and decoding returns it unchanged.
- Digits and map symbols are always single tokens, so maps and numbers are read symbol by symbol.
- The tokenizer depends on the texts alone.

Files are in Hugging Face's format, so anything that loads a checkpoint can load them.
"""

import json
import re
from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

USER, AGENT, END = "<|user|>", "<|agent|>", "<|end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    f"{{% if message.role == 'assistant' %}}{AGENT}{{{{ message.content }}}}{END}"
    f"{{% else %}}{USER}{{{{ message.content }}}}{{% endif %}}"
    "{% endfor %}"
    f"{{% if add_generation_prompt %}}{AGENT}{{% endif %}}"
)
_WORD = r" ?[A-Za-z][a-z]*"
_SPACE = "Ġ"
"""A space, as written in a byte-level vocabulary."""


def build_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """A tokenizer in which each word of these texts is one token.

    >>> build_tokenizer(["go up"]).encode("go up AG 12").tokens
    ['go', 'Ġup', 'Ġ', 'A', 'G', 'Ġ', '1', '2']
    """
    words = sorted({word.replace(" ", _SPACE) for text in texts for word in re.findall(_WORD, text) if len(word) > 1})
    signs = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate((*signs, *words))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(rf"{_WORD}|\s|."), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(marker, special=True, normalized=False) for marker in (USER, AGENT, END)])
    return tokenizer


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Files to put beside a model's weights, by name."""
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "chat_template": CHAT_TEMPLATE}
    return {
        "tokenizer.json": tokenizer.to_str(pretty=True).encode(),
        "tokenizer_config.json": json.dumps(about, indent=2).encode(),
    }
