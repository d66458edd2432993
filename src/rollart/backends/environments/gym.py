"""Adapter from the Gymnasium API, sync or async, to a `TextEnvironment`.

`reset(seed=…, options=…)` returns `(observation, info)` and `step(action)` Gymnasium's five values. Observations are
text, or `render_text` converts them. The prompt's seed and data become `seed` and `options`; `info["artifact"]` of the
last step is the artifact of the transcript. Gymnasium itself is not imported: any object with this API works,
including a plain class.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from rollart.ports.environment import AnyTextEnvironment, TextStep
from rollart.ports.factory import load

if TYPE_CHECKING:  # where environments have an interpreter of their own, there is no msgspec
    from rollart.types.trajectory import Prompt

ARTIFACT = "artifact"
"""Key of the last step's `info`: text or bytes for the reward function that the conversation does not hold."""


def _identity(value: Any) -> Any:
    return value


class GymEnvironment:
    """`parse_action` parses the agent's text. Its `ValueError` becomes the next observation and uses up a turn."""

    def __init__(
        self,
        environment: Any,
        render_text: Callable[[Any], str] = _identity,
        parse_action: Callable[[str], Any] = _identity,
    ) -> None:
        self._environment = environment
        self._render = render_text
        self._parse = parse_action

    def reset(self, prompt: Prompt) -> TextStep | Awaitable[TextStep]:
        return _then(self._environment.reset(seed=prompt.seed, options=dict(prompt.data)), self._first)

    def step(self, action: str) -> TextStep | Awaitable[TextStep]:
        try:
            parsed = self._parse(action)
        except ValueError as error:
            return TextStep(str(error))
        return _then(self._environment.step(parsed), self._next)

    def close(self) -> Any:
        close = getattr(self._environment, "close", None)
        return None if close is None else close()

    def _first(self, answer: Any) -> TextStep:
        if not (isinstance(answer, tuple) and len(answer) == 2):
            raise TypeError("reset must return (observation, info), as in Gymnasium")
        return TextStep(self._render(answer[0]))

    def _next(self, answer: Any) -> TextStep:
        if not (isinstance(answer, tuple) and len(answer) == 5):
            raise TypeError("step must return (observation, reward, terminated, truncated, info), as in Gymnasium")
        observation, reward, terminated, truncated, info = answer
        artifact = info.get(ARTIFACT, b"") if isinstance(info, Mapping) else b""
        return TextStep(
            self._render(observation),
            reward,
            done=bool(terminated or truncated),
            truncated=bool(truncated and not terminated),
            artifact=artifact.encode() if isinstance(artifact, str) else artifact,
        )


def make_gym(
    make: str, settings: Mapping[str, Any] | None = None, render_text: str = "", parse_action: str = ""
) -> GymEnvironment:
    """Build from factory paths, for the config of a task whose environment does not use text.

    >>> from rollart.types.trajectory import Prompt
    >>> lake = make_gym("gymnasium:make", {"id": "FrozenLake-v1", "is_slippery": False}, "builtins:str", "builtins:int")
    >>> lake.reset(Prompt("1", "lake", 1)).observation, lake.step("1").observation, lake.step("south").observation
    ('0', '4', "invalid literal for int() with base 10: 'south'")
    """
    return GymEnvironment(
        load(make)(**(settings or {})),
        load(render_text) if render_text else _identity,
        load(parse_action) if parse_action else _identity,
    )


def as_text_environment(environment: Any) -> AnyTextEnvironment:
    """Adapt what a task's factory built for `EnvironmentThread`. Gymnasium's API is recognised by `reset(seed=…)`."""
    if not hasattr(environment, "step"):
        raise TypeError(
            f"{type(environment).__name__} has no `step`; an environment with tools cannot be played by an interpreter "
            "of its own, so leave out `python`"
        )
    reset = environment.reset
    return GymEnvironment(environment) if _takes_seed(getattr(reset, "__func__", reset)) else environment


@lru_cache(maxsize=64)
def _takes_seed(reset: Callable[..., Any]) -> bool:
    return "seed" in inspect.signature(reset).parameters


def _then(answer: Any, convert: Callable[[Any], TextStep]) -> TextStep | Awaitable[TextStep]:
    """Convert the answer now, or once it has been awaited."""
    if not inspect.isawaitable(answer):
        return convert(answer)

    async def later() -> TextStep:
        return convert(await answer)

    return later()
