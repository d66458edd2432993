"""Dialogue: the messages of one episode as tokens, turn by turn.

    observe(messages) ─► tokens ─► sampled answer ─► acted(ids) ─► observe(tool messages) ─► tokens that follow ─► …

Invariant: sampled ids are never rendered again. Where a chat template would render what was before differently (it
drops the thoughts of earlier answers), `observe` returns a whole new context instead of what follows.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from rollart.backends.environments.codec import Codec
from rollart.types.chat import Message, ToolSchema, plain


class Rendered(NamedTuple):
    """Tokens of an observation, up to the agent's turn."""

    tokens: list[int]
    rewritten: bool = False
    """They are the whole conversation, with earlier turns as the template renders them now."""


class Dialogue(Protocol):
    """Used by one environment thread."""

    def observe(self, messages: Sequence[Message]) -> Rendered:
        """Tokens of new messages."""
        ...

    def acted(self, action: Sequence[int]) -> None:
        """What was sampled in answer to them."""
        ...


@runtime_checkable
class DialogueCodec(Codec, Protocol):
    """A codec that knows the roles of messages."""

    @property
    def tool_format(self) -> str:
        """How its model writes tool calls: hermes, llama or plain."""
        ...

    @property
    def describes_tools(self) -> bool:
        """Whether its chat template describes tools to the model."""
        ...

    def dialogue(self, tools: Sequence[ToolSchema]) -> Dialogue:
        """A dialogue in which these tools are offered."""
        ...


def open_dialogue(codec: Codec, tools: Sequence[ToolSchema] = ()) -> Dialogue:
    """The dialogue of a codec; of one that knows text only, the contents of the messages as text."""
    return codec.dialogue(tools) if isinstance(codec, DialogueCodec) else TextDialogue(codec)


def tool_format(codec: Codec | None) -> str:
    """How the model of a codec writes tool calls."""
    return codec.tool_format if isinstance(codec, DialogueCodec) else "plain"


def describes_tools(codec: Codec | None) -> bool:
    """Whether the model learns of tools by its chat template."""
    return isinstance(codec, DialogueCodec) and codec.describes_tools


class TextDialogue:
    """Dialogue of a codec without roles: the contents of messages become one text."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._action: Sequence[int] | None = None

    def observe(self, messages: Sequence[Message]) -> Rendered:
        before: list[int] = []
        if self._action is not None and not (self._action and self._action[-1] in self._codec.stop_tokens):
            before = list(self._codec.stop_tokens[:1])
        return Rendered([*before, *self._codec.render(plain(messages), first=self._action is None)])

    def acted(self, action: Sequence[int]) -> None:
        self._action = action
