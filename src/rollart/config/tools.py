"""Settings of tools that a task offers to its model."""

from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from rollart.config.base import Strict
from rollart.types.errors import ConfigError


class McpServer(Strict):
    """An MCP server whose tools a task offers: a command that speaks over stdin and stdout, or an HTTP address."""

    command: tuple[str, ...] = ()
    """Program and arguments of a server that each worker starts (stdio)."""
    url: str = ""
    """Address of a running server (streamable HTTP)."""
    env: dict[str, str] = Field(default_factory=dict)
    """Further environment variables of the command."""
    tools: tuple[str, ...] = ()
    """Names of the tools to offer; by default all."""
    per_episode: bool = False
    """Every episode gets a connection of its own, for servers that keep state; otherwise a worker has one."""
    starts_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 120.0
    """Limit of connecting and listing the tools."""

    @model_validator(mode="before")
    @classmethod
    def _address_alone(cls, data: Any) -> Any:
        if isinstance(data, str):
            return {"url": data}
        return {"command": data} if isinstance(data, list | tuple) else data

    @model_validator(mode="after")
    def _one_address(self) -> Self:
        if bool(self.command) == bool(self.url):
            raise ConfigError("mcp", "give either command (a list of words) or url")
        if self.url and not self.url.startswith(("http://", "https://")):
            raise ConfigError("mcp.url", f"{self.url!r} is not an http(s) address; give a command as a list of words")
        return self

    @property
    def label(self) -> str:
        return self.url or " ".join(self.command)


class Mcp(Strict):
    """An entry of `tools` that is an MCP server."""

    mcp: McpServer
