"""The Environment port: one episode of one agent in text, hosted by an environment worker.

Worker side: many environments live in one worker (`backends.environments.host`), which speaks `Reset`, `Step`, `Close`.
The object below is what a task provides. It may block: each runs in a thread of its own, so that a slow
one holds up nobody. Rendering and tokenising happen beside the environment: text never reaches the controller.
"""

from collections.abc import Awaitable
from typing import NamedTuple, Protocol

from rollart.types.trajectory import Prompt


class TextStep(NamedTuple):
    """What an environment answers. `observation` is text; `done` ends the episode.

    `truncated`: ended by a limit of the agent's own (turns, time, memory of its sandbox): the agent's result.
    `fresh_context`: the observation replaces the history instead of following it.
    `state`: names the state that the agent acts in next, where observations of the same state may differ (a hint, a
    time of day); turns of a group that start in the same state are compared. Empty: the observation is the state.
    """

    observation: str
    reward: float = 0.0
    done: bool = False
    truncated: bool = False
    fresh_context: bool = False
    artifact: bytes = b""
    state: str = ""


class TextEnvironment(Protocol):
    """One environment. Raising means that the environment failed, never that the agent did."""

    def reset(self, prompt: Prompt) -> TextStep:
        """Start over; gives the first observation, with the instructions."""
        ...

    def step(self, action: str) -> TextStep:
        """Act. Nonsense from the agent is answered, not raised."""
        ...

    def close(self) -> None:
        """Free everything; may be called at any time, also after a failure."""
        ...


class AsyncTextEnvironment(Protocol):
    """The same with coroutines. Each environment has an event loop of its own, which runs while it is asked."""

    def reset(self, prompt: Prompt) -> Awaitable[TextStep]: ...

    def step(self, action: str) -> Awaitable[TextStep]: ...

    def close(self) -> Awaitable[None]: ...


class MixedTextEnvironment(Protocol):
    """Either, call by call."""

    def reset(self, prompt: Prompt) -> TextStep | Awaitable[TextStep]: ...

    def step(self, action: str) -> TextStep | Awaitable[TextStep]: ...

    def close(self) -> Awaitable[None] | None: ...


AnyTextEnvironment = TextEnvironment | AsyncTextEnvironment | MixedTextEnvironment
