"""Tool descriptions and tool calls in the format of a codec's model, for rows and for environments."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from rollart.backends.environments.codec import Codec
from rollart.backends.environments.dialogue import describes_tools, tool_format
from rollart.backends.environments.tool_calls import Call, Malformed, instructions, parse, written
from rollart.config.suggest import did_you_mean
from rollart.ports.environment import ToolError
from rollart.types.chat import Message, ToolSchema
from rollart.types.transcript import ToolCall

MOST_CALLS = 32
"""Maximum calls of one answer; more are refused, and none of them is made."""


class ToolDialect:
    """`wanted` is a format of calls, or `auto`: that of the codec's chat template."""

    def __init__(self, wanted: str, codec: Codec | None) -> None:
        own = tool_format(codec)
        self._format = own if wanted == "auto" else wanted
        self._by_template = describes_tools(codec) and self._format == own

    def introduced(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[Message]:
        """First messages, with a description of the tools unless the chat template renders one."""
        if not tools or self._by_template:
            return list(messages)
        described = instructions(self._format, tools)
        if messages[0]["role"] == "system":
            return [{"role": "system", "content": f"{messages[0]['content']}\n{described}"}, *messages[1:]]
        return [{"role": "system", "content": described}, *messages]

    def offered(self, tools: Sequence[ToolSchema]) -> Sequence[ToolSchema]:
        """Schemas that the chat template describes."""
        return tools if self._by_template else ()

    def calls(self, answer: str, tools: Sequence[ToolSchema]) -> Sequence[Call | Malformed]:
        """The calls of an answer, in order; none if it is final."""
        found = parse(self._format, answer, tools)
        if len(found) > MOST_CALLS:
            return [Malformed(f"{len(found)} calls in one answer; make {MOST_CALLS} at most")]
        return found

    def written(self, call: Call) -> str:
        """A call as the model would write it."""
        return written(self._format, call)


def unknown(name: str, tools: Collection[str]) -> ToolError:
    known = ", ".join(tools)
    return ToolError(f"there is no tool {name[:80]!r}{did_you_mean(name, tools)}; there are {known}")


def message(call: Call | Malformed, text: str, tools: Collection[str]) -> Message:
    """The result of a call, as the model sees it."""
    return {"role": "tool", **({"name": call.name} if call.name in tools else {}), "content": text}


def recorded(call: Call | Malformed, error: str) -> ToolCall:
    """A call for the transcript."""
    return ToolCall(call.name, _arguments(call.arguments) if isinstance(call, Call) else {}, error)


def _arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """As text if they are more than a transcript can hold, such as a number of 30 digits."""
    try:
        msgspec.msgpack.encode(arguments)
    except (OverflowError, RecursionError, TypeError, ValueError):
        return {"arguments": json.dumps(arguments)}
    return dict(arguments)
