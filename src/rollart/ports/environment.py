"""The Environment port: one episode of one agent in text, hosted by an environment worker.

Many environments live in one worker (`backends.environments.host`), which handles `Reset`, `Step` and `Close`. A task
provides the object below. It may block: each runs in its own thread, so that a slow one does not delay others.
Rendering and tokenising happen beside the environment: text never reaches the controller.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:  # where environments have an interpreter of their own, there is no msgspec
    from rollart.types.chat import Message, ToolSchema
    from rollart.types.trajectory import Prompt
    from rollart.types.transcript import ToolCall


class TextStep(NamedTuple):
    """Response of an environment. `observation` is text or chat messages; `done` ends the episode.

    `truncated`: ended by one of the agent's own limits (turns, time, memory of its sandbox), which is its result.
    `fresh_context`: the observation replaces the history instead of following it.
    `artifact`: of the last step, data for the reward function that is not part of the conversation.
    `state`: identifies the state that the agent acts in next, if observations of the same state may differ (a hint, a
    time of day); turns of a group that start in the same state are compared. Empty = the observation is the state.
    `tools`: with the messages of a first observation, the tools that the chat template describes to the model.
    `calls`: the tool calls found in the action, for the transcript.
    """

    observation: str | Sequence[Message]
    reward: float = 0.0
    done: bool = False
    truncated: bool = False
    fresh_context: bool = False
    artifact: bytes = b""
    state: str = ""
    tools: Sequence[ToolSchema] = ()
    calls: tuple[ToolCall, ...] = ()


class TextEnvironment(Protocol):
    """One environment. An exception means that the environment failed, never that the agent did."""

    def reset(self, prompt: Prompt) -> TextStep:
        """Start an episode; returns the first observation, with the instructions."""
        ...

    def step(self, action: str) -> TextStep:
        """Act. Invalid actions of the agent get an observation, not an exception."""
        ...

    def close(self) -> None:
        """Free all resources; may be called at any time, also after a failure."""
        ...


class AsyncTextEnvironment(Protocol):
    """The same with coroutines. Each environment has its own event loop, which runs during its calls."""

    def reset(self, prompt: Prompt) -> Awaitable[TextStep]: ...

    def step(self, action: str) -> Awaitable[TextStep]: ...

    def close(self) -> Awaitable[None]: ...


class MixedTextEnvironment(Protocol):
    """Sync or async, method by method."""

    def reset(self, prompt: Prompt) -> TextStep | Awaitable[TextStep]: ...

    def step(self, action: str) -> TextStep | Awaitable[TextStep]: ...

    def close(self) -> Awaitable[None] | None: ...


@runtime_checkable
class SharingFactory(Protocol):
    """A factory of environments whose episodes share something in their worker, such as a source of sandboxes."""

    def open_shared(self, **settings: Any) -> Shared:
        """Called when a worker starts, with the settings of the environments."""
        ...


class Shared(Protocol):
    """What the environments of a worker share."""

    def close(self) -> None:
        """Called when the worker is over, after all its environments were closed, or left behind because they hang."""
        ...


class ToolError(Exception):
    """Why a tool call has no result, for the agent."""


@runtime_checkable
class ToolEnvironment(Protocol):
    """An environment whose agent acts by tool calls alone, in whatever format its model writes them.

    The worker describes the tools to the model and reads its calls, as for rows with tools (docs/tools.md). The calls
    of one answer are made one after the other, in order, in the thread of `reset`.
    """

    @property
    def tools(self) -> Sequence[Callable[..., Any]]:
        """Functions and bound methods, with types and a docstring. They raise `ToolError` for what the agent did wrong;
        any other exception means that the environment failed."""
        ...

    def reset(self, prompt: Prompt) -> TextStep:
        """Start an episode; returns the first observation, without a description of the tools."""
        ...

    def finish(self, answer: str) -> TextStep:
        """End the episode: the agent gave an answer without a call, or made its last call (then `answer` is empty)."""
        ...

    def close(self) -> None:
        """Free all resources; may be called at any time, also after a failure."""
        ...


AnyTextEnvironment = TextEnvironment | AsyncTextEnvironment | MixedTextEnvironment
