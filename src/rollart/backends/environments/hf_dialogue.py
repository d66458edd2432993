"""Dialogue by a chat template: every observation is what the template adds to what the engine has seen.

    before   <|im_start|>user↵ ⟨1⟩ <|im_end|>↵<|im_start|>assistant↵
    answer   ⟨2⟩                                                       sampled ids, never rendered again
    now      <|im_start|>user↵ ⟨1⟩ <|im_end|>↵<|im_start|>assistant↵⟨2⟩<|im_end|>↵<|im_start|>tool↵ ⟨3⟩ …
                                                                       └──────── the observation ─────────

The template is rendered with a probe for every content. If `now` begins with `before` and the answer, the rest is the
observation. Otherwise the template rewrites the history, and the observation is the whole of `now` in a new sequence.

Invariants:
- Contents never yield marker tokens, and neither do the schemas of tools.
- What the template does to contents of observations is followed as far as the probes show it: stripped whitespace and
  JSON escapes. Answers are kept as they were sampled.
"""

import json
import re
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Protocol

from rollart.backends.environments.chat_template import ChatTemplate, NotRendered
from rollart.backends.environments.dialogue import Rendered
from rollart.types.chat import Message, ToolSchema
from rollart.types.errors import EnvironmentFault, RequestError

SPACE = "\x0b"
"""Around the probe of a content: whitespace that templates strip and none contains."""
_PROBE = re.compile(r'(\x0b|\\u000b)?probe(\d+)(\\?)"(content|thought|answer)(\x0b|\\u000b)?')
THINK, THOUGHT = "<think>", "</think>"


class Tokens(Protocol):
    """The tokenizer of a codec."""

    @property
    def stop_tokens(self) -> tuple[int, ...]: ...

    def text(self, action: Sequence[int]) -> str: ...

    def piece(self, text: str) -> list[int]:
        """Text of the template, with markers."""
        ...

    def content(self, text: str) -> list[int]:
        """Text of a message, without markers."""
        ...


class HfDialogue:
    """See the module. `role_of_tools`: how the template wants results of tools, as `tool` or as `user`."""

    def __init__(
        self, tokens: Tokens, template: ChatTemplate, tools: Sequence[ToolSchema], role_of_tools: str, name: str
    ) -> None:
        self._tokens = tokens
        self._template = template
        self._tools = tools
        self._role_of_tools = role_of_tools
        self._name = name
        self._began = datetime.now()
        """The date in a template stays the same throughout an episode."""
        self._history: list[Message] = []
        self._contents: list[str] = []
        """Texts of the messages, by the number of their probe; empty for answers."""
        self._answers: dict[int, tuple[str, list[int]]] = {}
        """Thought and rest of each answer: as text, and as the ids that were sampled."""
        self._before = ""
        self._ended = False

    def observe(self, messages: Sequence[Message]) -> Rendered:
        self._history += [self._probed(message) for message in messages]
        try:
            now = self._template.dialogue(self._history, self._tools, self._began)
        except NotRendered as error:
            raise EnvironmentFault(
                f"the chat template of {self._name} cannot render these messages: {error}"
            ) from error
        before, self._before = self._before, now
        missing = [number for number in self._numbers(messages) if f'probe{number}"' not in _unescaped(now)]
        if missing:
            raise EnvironmentFault(f"the chat template of {self._name} drops the content of a message")
        if not before:
            return Rendered(self._encoded(now))
        if not now.startswith(before):
            return Rendered(self._encoded(now), rewritten=True)
        return Rendered(self._following(now.removeprefix(before)))

    def acted(self, action: Sequence[int]) -> None:
        number = len(self._contents)
        self._contents.append("")
        stops = self._tokens.stop_tokens
        self._ended = bool(action) and action[-1] in stops
        ids = list(action[:-1] if self._ended else action)
        text = self._tokens.text(ids)
        answer = f'probe{number}"answer'
        thought = ""
        if THOUGHT in text:
            ids = _after(ids, lambda part: THOUGHT in self._tokens.text(part))
            ids = _after(ids, lambda part: bool(self._tokens.text(part).strip("\n")), keep=True)
            thought = text.partition(THOUGHT)[0]
            opened = thought.lstrip().startswith(THINK)
            thought = thought.replace(THINK, "", 1).strip("\n")
            head = f"{THINK}\n" if opened else ""
            answer = f'{head}probe{number}"thought\n{THOUGHT}\n\n{answer}'
        self._answers[number] = (thought, ids)
        self._history.append({"role": "assistant", "content": answer})
        self._before += answer

    def _probed(self, message: Message) -> Message:
        number = len(self._contents)
        role, content = message["role"], str(message["content"])
        if role == "tool" and self._role_of_tools != "tool":
            role, content = self._role_of_tools, f"{message.get('name', 'tool')}: {content}"
        self._contents.append(content)
        name = {"name": message["name"]} if role == "tool" and "name" in message else {}
        return {"role": role, "content": f'{SPACE}probe{number}"content{SPACE}', **name}

    def _numbers(self, messages: Sequence[Message]) -> range:
        return range(len(self._contents) - len(messages), len(self._contents))

    def _following(self, text: str) -> list[int]:
        """Tokens after an answer; its end is sampled, or added if a limit cut it off."""
        tokens = self._encoded(text)
        return tokens[1:] if self._ended and tokens and tokens[0] in self._tokens.stop_tokens else tokens

    def _encoded(self, text: str) -> list[int]:
        tokens: list[int] = []
        start = 0
        for found in _PROBE.finditer(text):
            tokens += self._tokens.piece(text[start : found.start()])
            tokens += self._probe_tokens(found)
            start = found.end()
        return tokens + self._tokens.piece(text[start:])

    def _probe_tokens(self, found: re.Match[str]) -> list[int]:
        left, number, escape, kind, right = found.groups()
        if kind == "answer":
            return self._answers[int(number)][1]
        if kind == "thought":
            return self._tokens.content(self._answers[int(number)][0])
        content = self._contents[int(number)]
        if not left:
            content = content.lstrip()
        if not right:
            content = content.rstrip()
        return self._tokens.content(json.dumps(content, ensure_ascii=False)[1:-1] if escape else content)


def _after(ids: list[int], holds: Callable[[list[int]], bool], *, keep: bool = False) -> list[int]:
    """The ids after the shortest beginning for which `holds`, which is monotone; with `keep`, its last id included."""
    low, high = 0, len(ids)
    while low < high:
        middle = (low + high) // 2
        if holds(ids[:middle]):
            high = middle
        else:
            low = middle + 1
    return ids[max(0, low - 1) if keep and low and holds(ids[:low]) else low :]


def _unescaped(text: str) -> str:
    return text.replace('\\"', '"')


def check_schemas(tools: Sequence[ToolSchema], markers: Sequence[str]) -> None:
    """Refuse schemas whose text would be read as markers of the template."""
    for tool in tools:
        text = json.dumps(tool, ensure_ascii=False)
        found = next((marker for marker in markers if marker in text), None)
        if found is not None:
            raise RequestError(
                f"the description of the tool {tool['function']['name']!r} contains {found!r}, a marker of the chat "
                "template; change the description"
            )
