"""Codec of a Hugging Face checkpoint: its `tokenizer.json`, and its chat template split into pieces once.

    template  <|im_start|>user↵ OBSERVATION <|im_end|>↵<|im_start|>assistant↵ ANSWER <|im_end|> ↵<|im_start|>user↵ …
              └──────── rendered, first ────────────────────────────────────┘ └─ sampled ────┘ └─ rendered, next …

The pieces around the content are found by rendering probe messages when the codec is built. Invariants:
- Tokens are only ever appended: pieces and observations are tokenised once, separately, and answers never.
- The template's rendering of a conversation equals what was appended turn by turn; otherwise the template is refused.
  One that rewrites earlier turns (drops thoughts, numbers turns) cannot be followed token by token.
- Text never yields marker tokens of the tokenizer: observations cannot inject any.
"""

import datetime
import json
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

from rollart.backends.environments.chat_template import ChatTemplate, NotRendered
from rollart.backends.environments.hf_dialogue import HfDialogue, check_schemas
from rollart.types.chat import ToolSchema
from rollart.types.errors import EnvironmentFault, RequestError

PROBES = tuple(f"probe{number}content" for number in range(7))
"""Contents that no template contains by itself: observations and answers alternately."""
_PROBED_AT = datetime.datetime(2026, 1, 1)
TEXTS_KEPT = 1024
"""Cached encodings: all attempts at a prompt share their first observation, and often later ones."""


class Pieces(NamedTuple):
    """Text that a chat template puts around the contents."""

    begin: str
    """Before the first observation."""
    speak: str
    """After an observation, before the agent's turn."""
    resume: str
    """After an answer, including its end token, before the next observation."""


class HfCodec:
    """A `Codec`. `folder` holds a checkpoint's tokenizer and chat template; nothing is downloaded.

    `stop_tokens`: the token that ends an answer in the template, then the tokenizer's own end token if it differs.
    """

    def __init__(self, folder: str) -> None:
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise RequestError(f"{folder!r} has no tokenizer.json; give a folder with a checkpoint and its tokenizer")
        self._tokenizer = Tokenizer.from_file(str(path))
        self._plain, self._markers = without_markers(path)
        self._spoken = spoken_markers(path)
        self._folder = folder
        self._template = template = ChatTemplate(folder)
        pieces = _take_apart(folder, template)
        self._begin, self._speak, resume = (
            self._tokenizer.encode(piece, add_special_tokens=False).ids for piece in pieces
        )
        if not resume or resume[0] not in self._markers:
            raise _refusal(folder, f"an answer is followed by {pieces.resume!r}, which does not start with a marker")
        self._resume = resume[1:]
        own_end = None if template.end is None else self._tokenizer.token_to_id(template.end)
        self.stop_tokens = (resume[0],) if own_end in (None, resume[0]) else (resume[0], own_end)
        self.vocabulary = max(self._tokenizer.get_vocab().values()) + 1
        self._content = lru_cache(maxsize=TEXTS_KEPT)(self._encoded)
        self._role_of_tools = _role_of_tools(template)
        self.tool_format = _tool_format(template) if _describes_tools(template) else "plain"
        self.describes_tools = self.tool_format != "plain"

    def render(self, observation: str, first: bool) -> list[int]:
        return [*(self._begin if first else self._resume), *self._content(observation), *self._speak]

    def text(self, action: Sequence[int]) -> str:
        """Drop special tokens and unknown ids; replace invalid UTF-8."""
        return str(self._tokenizer.decode(list(action), skip_special_tokens=True))

    def answer(self, text: str) -> list[int]:
        """Tokens of a written (not sampled) answer, with its end token: for supervised training on transcripts.

        Markers that `text` shows, such as `<tool_call>`, are read as markers: a model samples them as one token.
        """
        ids: list[int] = []
        for part in re.split(f"({'|'.join(map(re.escape, self._spoken))})", text) if self._spoken else [text]:
            ids += [self._spoken[part]] if part in self._spoken else self._content(part)
        return [*ids, self.stop_tokens[0]]

    def dialogue(self, tools: Sequence[ToolSchema]) -> HfDialogue:
        """A conversation of messages, as the template renders them."""
        check_schemas(tools, self._texts_of_markers)
        return HfDialogue(self, self._template, tools, self._role_of_tools, repr(self._folder))

    def piece(self, text: str) -> list[int]:
        """Tokens of the template's own text, with markers."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def content(self, text: str) -> list[int]:
        """Tokens of a text that is not the template's."""
        return self._content(text)

    @property
    def _texts_of_markers(self) -> list[str]:
        return [str(self._tokenizer.id_to_token(id)) for id in sorted(self._markers)]

    def _encoded(self, text: str) -> list[int]:
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        if not self._markers.isdisjoint(ids):
            found = sorted(self._markers.intersection(ids))
            raise EnvironmentFault(f"the text {text[:80]!r} contains marker tokens {found}, which are not allowed")
        return ids


def without_markers(path: Path) -> tuple[Tokenizer, frozenset[int]]:
    """The same tokenizer with its added tokens as ordinary text, and the ids of these markers.

    The unknown token is not a marker: it carries no meaning, and any text may contain it.
    """
    description = json.loads(path.read_text(encoding="utf-8"))
    model = description["model"]
    added = [
        (int(token["id"]), str(token["content"]))
        for token in description["added_tokens"]
        if token["content"] != model.get("unk_token") and token["id"] != model.get("unk_id")
    ]
    markers = frozenset(id for id, _ in added)
    description["added_tokens"] = []
    description["post_processor"] = None
    plain = Tokenizer.from_str(json.dumps(description))
    for _, text in added:
        if not markers.isdisjoint(plain.encode(text, add_special_tokens=False).ids):
            raise RequestError(
                f"the tokenizer {path} reads {text!r} as a marker even in plain text, so an environment could "
                "speak for the agent. Use a tokenizer whose markers are not in its model's vocabulary."
            )
    return plain, markers


def spoken_markers(path: Path) -> dict[str, int]:
    """Added tokens that decoding shows, such as `<tool_call>`, the longest first, with their ids."""
    added = json.loads(path.read_text(encoding="utf-8"))["added_tokens"]
    shown = {str(token["content"]): int(token["id"]) for token in added if not token["special"]}
    return dict(sorted(shown.items(), key=lambda each: -len(each[0])))


def _role_of_tools(template: ChatTemplate) -> str:
    """The role of results: `tool` if the template renders it without knowing the calls, else `user`."""
    user, answer, result = PROBES[:3]
    messages = [
        {"role": "user", "content": user},
        {"role": "assistant", "content": answer},
        {"role": "tool", "name": "probe", "content": result},
    ]
    try:
        text = template.dialogue(messages, (), _PROBED_AT)
    except NotRendered:
        return "user"
    return "tool" if all(probe in text for probe in PROBES[:3]) else "user"


def _describes_tools(template: ChatTemplate) -> bool:
    function = {"name": "probe_tool", "description": "", "parameters": {"type": "object", "properties": {}}}
    try:
        text = template.dialogue(
            [{"role": "user", "content": PROBES[0]}], [{"type": "function", "function": function}], _PROBED_AT
        )
    except NotRendered:
        return False
    return "probe_tool" in text


def _tool_format(template: ChatTemplate) -> str:
    """By what the template tells the model; one that is like neither gets the plain format, described in words."""
    source = template.source
    if "<tool_call>" in source and not any(other in source for other in ("<function=", "<arg_key>")):
        return "hermes"
    return "llama" if '"parameters"' in source and "ipython" in source else "plain"


def _take_apart(folder: str, template: ChatTemplate) -> Pieces:
    """Extract the pieces from one and two turns, and verify them on longer conversations."""
    begin, speak = _split(folder, _rendered(template, 1), PROBES[:1])
    *_, resume, _ = _split(folder, _rendered(template, 2), PROBES[:3])
    pieces = Pieces(begin, speak, resume)
    for turns in (1, 2, 3, 4):
        expected, given = _joined(pieces, turns), _rendered(template, turns)
        if expected != given:
            raise _refusal(folder, f"with {turns} turns it renders {given!r} where {expected!r} was appended")
    return pieces


def _rendered(template: ChatTemplate, turns: int) -> str:
    return template.render(PROBES[: 2 * turns - 1])


def _split(folder: str, rendered: str, probes: Sequence[str]) -> list[str]:
    """Text before, between and after the probes."""
    out = []
    for probe in probes:
        before, found, rendered = rendered.partition(probe)
        if not found:
            raise _refusal(folder, "it changes or drops the content of a message")
        out.append(before)
    return [*out, rendered]


def _joined(pieces: Pieces, turns: int) -> str:
    text = pieces.begin + PROBES[0] + pieces.speak
    for turn in range(1, turns):
        text += PROBES[2 * turn - 1] + pieces.resume + PROBES[2 * turn] + pieces.speak
    return text


def _refusal(folder: str, why: str) -> RequestError:
    return RequestError(
        f"the chat template of {folder!r} cannot be followed turn by turn: {why}. "
        "Give the checkpoint a chat_template.jinja in which a conversation only grows."
    )
