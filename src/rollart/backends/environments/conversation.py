"""Whole conversations as tokens, for a model that is talked to instead of trained.

    template  <|im_start|>system↵ SYSTEM <|im_end|>↵<|im_start|>user↵ TEXT <|im_end|>↵<|im_start|>assistant↵
              └─────── piece ──┘        └──────── piece ───────────┘      └─────────── piece ─────────────┘

Invariants:
- A conversation of observations and answers gets the tokens that the model was trained with: pieces and contents are
  tokenised separately, as by the codecs, and contents are neither trimmed nor changed.
- The contents of messages never yield marker tokens: a user's text cannot speak for the system.
- What the template does with roles (merge, move or drop messages) is followed; what it would do with contents is not.
"""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer

from rollart.backends.environments.chat_template import ChatTemplate, NotRendered
from rollart.backends.environments.codec import Codec
from rollart.backends.environments.hf_codec import without_markers
from rollart.types.errors import RequestError

Message = tuple[str, str]
"""Role (system, user or assistant) and content."""
_PROBE = re.compile(r"probe(\d+)content")


class Conversations(Protocol):
    """Between the texts of clients and a model's tokens; thread-safe."""

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Tokens that end an answer."""
        ...

    @property
    def no_chat(self) -> str:
        """Why the model takes no conversations, as a sentence; empty if it does."""
        ...

    def render(self, messages: Sequence[Message]) -> list[int]:
        """Tokens of a conversation, up to the next answer; raises `NotRendered`."""
        ...

    def encode(self, text: str) -> list[int]:
        """Tokens of a text to be continued; raises `NotRendered`."""
        ...

    def text(self, answer: Sequence[int]) -> str:
        """Text of an answer."""
        ...

    def token(self, id: int) -> str:
        """Text of one token; markers by their names."""
        ...


class HfConversations:
    """By the `tokenizer.json` and the chat template of a checkpoint folder. Without a template it takes no chats."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        self._tokenizer = Tokenizer.from_file(str(path))
        self._plain, self._markers = without_markers(path)
        for tokenizer in (self._tokenizer, self._plain):
            # Files may carry both from training; a prompt that is too long is refused, not cut.
            tokenizer.no_truncation()
            tokenizer.no_padding()
        self._template: ChatTemplate | None = None
        self.no_chat = ""
        if _has_template(folder):
            self._template = ChatTemplate(str(folder))
        else:
            self.no_chat = "This model has no chat template. Use /v1/completions, or serve an instruct checkpoint."
        self.stop_tokens = tuple(dict.fromkeys([*self._turn_ends(), *_declared_ends(folder, self._tokenizer)]))

    def render(self, messages: Sequence[Message]) -> list[int]:
        if self._template is None:
            raise NotRendered(self.no_chat)
        probes = [(role, f"probe{number}content") for number, (role, _) in enumerate(messages)]
        tokens: list[int] = []
        for at, part in enumerate(_PROBE.split(self._template.conversation(probes))):
            # The split alternates between the template's text and the number of a message.
            tokens += self._content(messages[int(part)][1]) if at % 2 else self._piece(part)
        return tokens

    def encode(self, text: str) -> list[int]:
        """With the tokens that the tokenizer begins a text with. Markers are read, as the client writes the whole."""
        return list(self._tokenizer.encode(text).ids)

    def text(self, answer: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(answer), skip_special_tokens=True))

    def token(self, id: int) -> str:
        return str(self._tokenizer.decode([id], skip_special_tokens=False))

    def _piece(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _content(self, text: str) -> list[int]:
        ids = list(self._plain.encode(text, add_special_tokens=False).ids)
        if not self._markers.isdisjoint(ids):
            raise NotRendered(f"the text {text[:80]!r} contains markers of the chat template, which are not allowed")
        return ids

    def _turn_ends(self) -> list[int]:
        """The marker that the template puts after an answer, if it starts with one."""
        if self._template is None:
            return []
        roles = ("user", "assistant", "user")
        probes = [(role, f"probe{number}content") for number, role in enumerate(roles)]
        try:
            after = _PROBE.split(self._template.conversation(probes))
        except NotRendered:
            return []
        first = self._piece(after[after.index("1") + 1])[:1] if "1" in after else []
        return [id for id in first if id in self._markers]


class CodecConversations:
    """By the codec of a run. A conversation alternates between user and assistant, as the model was trained."""

    no_chat = ""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self.stop_tokens = codec.stop_tokens

    def render(self, messages: Sequence[Message]) -> list[int]:
        if any(role != ("user", "assistant")[number % 2] for number, (role, _) in enumerate(messages)):
            raise NotRendered("this model was trained on messages of user and assistant in turns, the user's first")
        if len(messages) % 2 == 0:
            raise NotRendered("the last message must be the user's")
        answer: Callable[[str], list[int]] | None = getattr(self._codec, "answer", None)
        if answer is None and len(messages) > 1:
            raise NotRendered("the codec of this model has no method `answer`, so only one message can be sent")
        tokens: list[int] = []
        for number, (_, content) in enumerate(messages):
            tokens += answer(content) if answer and number % 2 else self._codec.render(content, first=not number)
        return tokens

    def encode(self, text: str) -> list[int]:  # noqa: ARG002 - none is supported
        raise NotRendered("this model has no tokenizer for plain text; send token ids, or use /v1/chat/completions")

    def text(self, answer: Sequence[int]) -> str:
        return self._codec.text(answer)

    def token(self, id: int) -> str:
        return self._codec.text([id])


def _has_template(folder: Path) -> bool:
    return (folder / "chat_template.jinja").is_file() or bool(
        _json(folder / "tokenizer_config.json").get("chat_template")
    )


def _declared_ends(folder: Path, tokenizer: Tokenizer) -> list[int]:
    """End tokens that the checkpoint's files name: of the tokenizer, and of generation or of the model."""
    eos = _json(folder / "tokenizer_config.json").get("eos_token")
    name = eos["content"] if isinstance(eos, dict) else eos
    id = tokenizer.token_to_id(name) if name else None
    found = [] if id is None else [int(id)]
    for file in ("generation_config.json", "config.json"):
        ends = _json(folder / file).get("eos_token_id")
        if ends is not None:
            return found + [int(end) for end in (ends if isinstance(ends, list) else [ends])]
    return found


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RequestError(f"{path} is not JSON ({error}); download the checkpoint again") from error
    return found if isinstance(found, dict) else {}
