"""Tasks without an environment: a row of data as messages, the model's tool calls, and its final answer.

    row ─► messages ─► answer ─► calls? ─ no ─► over: the reward function sees the answer
                          ▲        │ yes
                          └────────┴─ all at once ─► tool messages

The episode ends with the first answer that calls no tool; without tools that is the first answer. `max_turns` bounds
the turns with calls: an agent that reaches it ends as truncated, its own result.
"""

import asyncio
import inspect
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from rollart.backends.environments.codec import Codec
from rollart.backends.environments.dialogue import open_dialogue
from rollart.backends.environments.mcp_tools import SHARED, McpServers
from rollart.backends.environments.prompt_text import PromptText
from rollart.backends.environments.tool_calls import Call, Malformed
from rollart.backends.environments.tool_dialect import ToolDialect, message, recorded, unknown
from rollart.backends.environments.tools import (
    FunctionTool,
    Tool,
    methods_of,
    names_of,
    schemas_of,
    shortened,
)
from rollart.config.tasks import TaskSettings
from rollart.config.tools import Mcp
from rollart.ports.environment import TextStep, ToolError
from rollart.ports.factory import load
from rollart.types.chat import Message, ToolSchema
from rollart.types.errors import RequestError
from rollart.types.trajectory import Prompt


class ChatTask:
    """What all episodes of a worker share. Without a codec, only rows can be checked."""

    def __init__(self, settings: TaskSettings, codec: Codec | None) -> None:
        self.settings = settings
        self._codec = codec
        self._text = PromptText(settings)
        servers = [tool.mcp for tool in settings.tools if isinstance(tool, Mcp)]
        self.servers = McpServers(servers, settings.tool_timeout_s) if servers else None
        self.numbers = itertools.count(SHARED + 1)
        """Source of episode numbers, which key the connections of `per_episode` servers."""
        self.targets = [load(tool) for tool in settings.tools if isinstance(tool, str)]
        self.schemas: list[ToolSchema] = [schema for target in self.targets for schema in schemas_of(target)]
        """Schemas of the Python tools; those of MCP servers are known once connected."""
        check_names(self.schemas)
        self.dialect = ToolDialect(settings.tool_format, codec)

    def messages(self, row: Mapping[str, Any], tools: Sequence[ToolSchema] | None = None) -> list[Message]:
        """The first messages of a row, with these tools; `RequestError` if it lacks a field."""
        return self.dialect.introduced(self._text.messages(row), self.schemas if tools is None else tools)

    def try_out(self, row: Mapping[str, Any]) -> None:
        """Render a row, an answer and the results of two tools, for what the chat template cannot do."""
        assert self._codec is not None
        dialogue = open_dialogue(self._codec, self.dialect.offered(self.schemas))
        dialogue.observe(self.messages(row))
        if self.settings.tools:
            dialogue.acted([])
            dialogue.observe([{"role": "tool", "name": "probe", "content": "1"}] * 2)

    def close(self) -> None:
        """End what is shared."""
        if self.servers is not None:
            self.servers.close()


class ChatEnvironment:
    """One episode."""

    def __init__(self, task: ChatTask) -> None:
        self._task = task
        self._number = next(task.numbers)
        self._tools: dict[str, Tool] = {}
        self._objects: list[Any] = []

    def reset(self, prompt: Prompt) -> TextStep | Awaitable[TextStep]:
        timeout_s = self._task.settings.tool_timeout_s
        for target in self._task.targets:
            if inspect.isclass(target):
                built = _built(target, prompt)
                self._objects.append(built)
                functions: list[Callable[..., Any]] = [getattr(built, name) for name in methods_of(target)]
            else:
                functions = [target]
            for function in functions:
                self._offer(FunctionTool(function, timeout_s))
        return self._begun(prompt) if self._task.servers is None else self._connected(self._task.servers, prompt)

    async def _connected(self, servers: McpServers, prompt: Prompt) -> TextStep:
        tools = await servers.tools(self._number)
        check_names([*self._schemas, *(tool.schema for tool in tools)])
        for tool in tools:
            self._offer(tool)
        return self._begun(prompt)

    def _offer(self, tool: Tool) -> None:
        self._tools[tool.schema["function"]["name"]] = tool

    @property
    def _schemas(self) -> list[ToolSchema]:
        return [tool.schema for tool in self._tools.values()]

    def _begun(self, prompt: Prompt) -> TextStep:
        tools = self._schemas
        return TextStep(self._task.messages(prompt.data, tools), tools=self._task.dialect.offered(tools))

    def step(self, action: str) -> TextStep | Awaitable[TextStep]:
        calls = self._task.dialect.calls(action, self._schemas) if self._tools else []
        return self._called(calls) if calls else TextStep("", done=True)

    async def _called(self, calls: Sequence[Call | Malformed]) -> TextStep:
        results = await asyncio.gather(*[self._result(call) for call in calls])
        made = tuple(recorded(call, error) for call, (_, error) in zip(calls, results, strict=True))
        messages = [message(call, text, self._tools) for call, (text, _) in zip(calls, results, strict=True)]
        return TextStep(messages, calls=made)

    async def _result(self, call: Call | Malformed) -> tuple[str, str]:
        """The text for the model, and the error if there is no result."""
        try:
            if isinstance(call, Malformed):
                raise ToolError(call.reason)
            tool = self._tools.get(call.name)
            if tool is None:
                raise unknown(call.name, self._tools)
            result = await tool.call(call.arguments)
        except ToolError as error:
            text = shortened(f"Error: {error}", self._task.settings.tool_result_chars)
            return text, text.removeprefix("Error: ")
        return shortened(result, self._task.settings.tool_result_chars), ""

    def close(self) -> Awaitable[None] | None:
        objects, self._objects = self._objects, []
        return self._closed(objects) if objects or self._task.servers is not None else None

    async def _closed(self, objects: Sequence[Any]) -> None:
        try:
            for built in objects:
                close = getattr(built, "close", None)
                ended = None if close is None else close()
                if inspect.isawaitable(ended):
                    await ended
        finally:
            if self._task.servers is not None:
                await self._task.servers.leave(self._number)


def _built(target: type, prompt: Prompt) -> Any:
    """An object of a tool class for one episode; its constructor may take the `prompt`."""
    return target(prompt=prompt) if "prompt" in inspect.signature(target).parameters else target()


def check_names(schemas: Sequence[ToolSchema]) -> None:
    names = names_of(schemas)
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise RequestError(f"two tools have the name {twice!r}; rename one")
