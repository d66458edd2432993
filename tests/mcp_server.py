"""A real MCP server over stdio, or over HTTP on a port of this machine: `python mcp_server.py [PORT [DOWN]]`.

It writes the number of its process to the file in `MCP_PIDS`, and counts the calls of its process. With DOWN, it is one
of before 2026, which keeps sessions, behind a proxy that answers 502 while a file of that name exists.
"""

import os
import sys
import time
from pathlib import Path

import uvicorn
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.shared.exceptions import MCPError
from mcp_types import CallToolResult, TextContent
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS

server = MCPServer("my-db")
CAPITALS = {"Peru": "Lima", "Japan": "Tokyo", "Egypt": "Cairo"}
calls = 0


@server.tool()
def capital(country: str) -> str:
    """Look up the capital of a country.

    Args:
        country: Its English name.
    """
    global calls
    calls += 1
    if country not in CAPITALS:
        raise ToolError(f"no country {country}")
    return CAPITALS[country]


@server.tool()
def count() -> int:
    """How many calls of `capital` this process has had."""
    return calls


@server.tool()
def leave() -> str:
    """End the server without an answer."""
    os._exit(3)


@server.tool()
def dawdle() -> str:
    """Never answer."""
    time.sleep(300)
    return ""


@server.tool()
def mislabelled() -> CallToolResult:
    """Return something else than its output schema says."""
    return CallToolResult(content=[TextContent(type="text", text="3")], structured_content={"total": "three"})


@server.tool()
def refuse(code: int) -> str:
    """Refuse the call with an error of the protocol."""
    raise MCPError(code, "not today")


server._tool_manager._tools["mislabelled"].fn_metadata.output_schema = {
    "type": "object",
    "properties": {"total": {"type": "integer"}},
    "required": ["total"],
}


def of_before_2026(app, down):
    """The ASGI application as a server that keeps sessions, behind a proxy."""

    async def served(scope, receive, send):
        versions = [value.decode() for name, value in scope.get("headers", ()) if name == b"mcp-protocol-version"]
        unknown = versions and versions[0] not in HANDSHAKE_PROTOCOL_VERSIONS
        if scope["type"] != "http" or not (unknown or down.exists()):
            await app(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 502 if down.exists() else 400, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    return served


def main() -> None:
    if "MCP_PIDS" in os.environ:
        with open(os.environ["MCP_PIDS"], "a") as file:
            file.write(f"{os.getpid()}\n")
    if len(sys.argv) > 2:
        app = of_before_2026(server.streamable_http_app(host="127.0.0.1"), Path(sys.argv[2]))
        uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
    elif len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run()


if __name__ == "__main__":
    main()
