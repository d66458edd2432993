"""A real MCP server: `python mcp_server.py [PORT]`, over stdio, or over streamable HTTP on a port of this machine.

It writes the number of its process to the file in `MCP_PIDS`, and counts the calls of its process.
"""

import os
import sys
import time

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

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


def main() -> None:
    if "MCP_PIDS" in os.environ:
        with open(os.environ["MCP_PIDS"], "a") as file:
            file.write(f"{os.getpid()}\n")
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run()


if __name__ == "__main__":
    main()
