"""Tools of MCP servers, over stdio and streamable HTTP, by the official SDK.

    episodes (threads)  ─ call ─►  McpServers: one thread with one event loop per worker  ─►  a connection per server

A connection is a task that enters the SDK's client, serves until it is asked to end, and leaves it in the same task, as
the SDK requires. It is opened when first needed, shared by all episodes of the worker, and opened again after it broke;
with `per_episode` each episode has its own, and so at most one per environment.

A server that cannot be reached, whose connection breaks, or that has forgotten its session, is a failure outside the
reach of the model: the episode ends as `env_failed`. What a tool answers, errors included, and a call that takes too
long are the model's result. Errors of HTTP and of the session look like refusals of a call; a request that lists the
tools tells them apart.
"""

import asyncio
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any

from pydantic import ValidationError

from rollart.backends.environments.tools import as_text
from rollart.config.tools import McpServer
from rollart.ports.environment import ToolError
from rollart.types.chat import ToolSchema
from rollart.types.errors import EnvironmentFault, RequestError

logger = logging.getLogger(__name__)

CLOSE_S = 4.0
"""Limit of ending all connections of a worker, which is killed after 5 s; the SDK ends servers that do not leave."""
PROBE_S = 10.0
"""Limit of asking a server that refused a call whether the session still works."""
SHARED = 0
"""Episode of the connection that all episodes share."""


class McpTool:
    """One tool of a connection."""

    def __init__(self, schema: ToolSchema, connection: "_Connection", timeout_s: float) -> None:
        self.schema = schema
        self._connection = connection
        self._timeout_s = timeout_s

    async def call(self, arguments: Mapping[str, Any]) -> str:
        name = self.schema["function"]["name"]
        answer = asyncio.wrap_future(self._connection.call(name, dict(arguments), self._timeout_s))
        return await answer


class McpServers:
    """The servers of a worker."""

    def __init__(self, servers: Sequence[McpServer], timeout_s: float) -> None:
        require_sdk()
        self._servers = servers
        self._timeout_s = timeout_s
        self._guard = threading.Lock()
        self._connections: dict[tuple[int, int], _Connection] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    async def tools(self, episode: int) -> list[McpTool]:
        """The tools of all servers for an episode; connects where needed."""
        found: list[McpTool] = []
        for number, server in enumerate(self._servers):
            connection = self._connection(number, episode if server.per_episode else SHARED)
            schemas = await asyncio.wrap_future(connection.opened)
            found += [McpTool(schema, connection, self._timeout_s) for schema in schemas]
        return found

    async def leave(self, episode: int) -> None:
        """End the connections that were the episode's own."""
        with self._guard:
            own = [self._connections.pop(key) for key in list(self._connections) if key[1] == episode != SHARED]
        ends = [connection.end() for connection in own]
        for end in ends:
            await asyncio.wrap_future(end)

    def close(self) -> None:
        """End all connections, and with them the servers that this worker started."""
        with self._guard:
            self._closed = True
            connections = list(self._connections.values())
            self._connections.clear()
            loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return
        deadline = time.monotonic() + CLOSE_S
        late = wait([connection.end() for connection in connections], CLOSE_S).not_done
        if late:
            logger.warning("%d MCP servers did not end within %g s", len(late), CLOSE_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(max(0.0, deadline - time.monotonic()))

    def _connection(self, number: int, episode: int) -> "_Connection":
        with self._guard:
            if self._closed:
                raise EnvironmentFault("the worker is closing")
            found = self._connections.get((number, episode))
            if found is None or found.broken:
                found = _Connection(self._servers[number], self._running_loop())
                self._connections[number, episode] = found
            return found

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            loop = self._loop = asyncio.new_event_loop()

            def serve() -> None:
                loop.run_forever()
                loop.close()

            self._thread = threading.Thread(target=serve, name="mcp", daemon=True)
            self._thread.start()
        return self._loop


class _Connection:
    """One client; its methods are called from other threads than the loop's."""

    def __init__(self, server: McpServer, loop: asyncio.AbstractEventLoop) -> None:
        self._server = server
        self._loop = loop
        self.opened: Future[list[ToolSchema]] = Future()
        self._ending: asyncio.Event = asyncio.Event()
        self._client: Any = None
        self._lost: str = ""
        self._served = asyncio.run_coroutine_threadsafe(self._serve(), loop)

    @property
    def broken(self) -> bool:
        return bool(self._lost) or self._served.done()

    def call(self, name: str, arguments: dict[str, Any], timeout_s: float) -> "Future[str]":
        return asyncio.run_coroutine_threadsafe(self._call(name, arguments, timeout_s), self._loop)

    def end(self) -> "Future[None]":
        self._loop.call_soon_threadsafe(self._ending.set)
        return self._served

    async def _serve(self) -> None:
        from mcp import Client

        try:
            async with asyncio.timeout(self._server.starts_s) as limit, Client(_target(self._server)) as client:
                schemas = await self._list(client)
                limit.reschedule(None)
                self._client = client
                self.opened.set_result(schemas)
                await self._ending.wait()
        except TimeoutError:
            self._lose(f"no answer within {self._server.starts_s:g} s")
        except Exception as error:  # noqa: BLE001 - whatever the SDK raises ends the connection, and all who wait for it
            self._lose(_reason(error), permanent=isinstance(_first(error), FileNotFoundError | RequestError))

    async def _list(self, client: Any) -> list[ToolSchema]:
        tools: list[Any] = []
        cursor: str | None = None
        while True:
            page = await client.list_tools(cursor=cursor)
            tools += page.tools
            cursor = page.next_cursor
            if not cursor:
                break
        wanted = self._server.tools
        missing = sorted(set(wanted) - {tool.name for tool in tools})
        if missing:
            known = ", ".join(tool.name for tool in tools)
            raise RequestError(f"it has no tool {missing[0]!r}; it has {known}")
        return [_schema(tool) for tool in tools if not wanted or tool.name in wanted]

    async def _call(self, name: str, arguments: dict[str, Any], timeout_s: float) -> str:
        from mcp.shared.exceptions import MCPError
        from mcp_types import CONNECTION_CLOSED, INVALID_PARAMS

        if self._client is None or self.broken:
            raise EnvironmentFault(f"the MCP server {self._server.label} is gone: {self._lost or 'it ended'}")
        try:
            async with asyncio.timeout(timeout_s):
                result = await self._client.call_tool(name, arguments)
        except TimeoutError as error:
            raise ToolError(f"no answer within {timeout_s:g} s") from error
        except MCPError as error:
            if error.code == INVALID_PARAMS or (error.code != CONNECTION_CLOSED and await self._answers()):
                raise ToolError(str(error)) from error  # the connection works, and the server refuses this call
            raise self._failed(error) from error
        except (RuntimeError, ValidationError) as error:
            if await self._answers():
                raise ToolError(f"its result is malformed: {str(error).splitlines()[0]}") from error
            raise self._failed(error) from error
        except (OSError, ExceptionGroup) as error:
            raise self._failed(error) from error
        text = _text(result)
        if result.is_error:
            raise ToolError(text)
        return text

    async def _answers(self) -> bool:
        """Whether the session still works."""
        try:
            async with asyncio.timeout(PROBE_S):
                await self._client.list_tools(cache_mode="bypass")
        except Exception:  # noqa: BLE001 - whatever it is, the session does not work
            return False
        return True

    def _failed(self, error: Exception) -> EnvironmentFault:
        self._lose(_reason(error))
        return EnvironmentFault(f"the MCP server {self._server.label} failed: {_reason(error)}")

    def _lose(self, reason: str, *, permanent: bool = False) -> None:
        self._lost = self._lost or reason
        self._ending.set()
        if not self.opened.done():
            kind = RequestError if permanent else EnvironmentFault
            self.opened.set_exception(kind(f"the MCP server {self._server.label} cannot be used: {reason}"))


def require_sdk() -> None:
    try:
        import mcp  # noqa: F401 - whether it is there
    except ModuleNotFoundError as error:
        raise RequestError("tools of MCP servers need the SDK; install it with: pip install 'rollart[mcp]'") from error


def _target(server: McpServer) -> Any:
    from mcp import StdioServerParameters

    if server.url:
        return server.url
    # Without more, the SDK passes on PATH, HOME and the like: secrets of a worker are not a server's business.
    return StdioServerParameters(
        command=server.command[0], args=list(server.command[1:]), env=dict(server.env) or None, cwd=os.getcwd()
    )


def _schema(tool: Any) -> ToolSchema:
    parameters = {key: value for key, value in tool.input_schema.items() if key not in ("title", "$schema")}
    parameters.setdefault("properties", {})
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description or "", "parameters": parameters},
    }


def _text(result: Any) -> str:
    """Texts of a result; other parts by their kind, because the model reads text."""
    parts = [part.text if part.type == "text" else f"[{part.type}]" for part in result.content]
    return "\n".join(parts) if parts else as_text(result.structured_content)


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _reason(error: BaseException) -> str:
    return f"{type(_first(error)).__name__}: {_first(error)}"
