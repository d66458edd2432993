"""Environments in Gymnasium's form, sync or async, as a `TextEnvironment`.

`reset(seed=…, options=…)` gives `(observation, info)` and `step(action)` the five values of Gymnasium. Observations are
text, or `render_text` makes text of them. The prompt's seed and data become `seed` and `options`; the last step's
`info["artifact"]` goes to the reward function. Nothing here imports Gymnasium: whatever has its form will do, a plain
class too.
"""

import inspect
from collections.abc import Awaitable, Callable, Mapping
from functools import lru_cache
from typing import Any

from rollart.ports.environment import AnyTextEnvironment, TextStep
from rollart.ports.factory import load
from rollart.types.trajectory import Prompt

ARTIFACT = "artifact"
"""Key of the last step's `info`: text or bytes for the reward function to judge."""


def _as_it_is(value: Any) -> Any:
    return value


class GymEnvironment:
    """`parse_action` makes the action out of what the agent said; its `ValueError` is told to the agent, at a turn."""

    def __init__(
        self,
        environment: Any,
        render_text: Callable[[Any], str] = _as_it_is,
        parse_action: Callable[[str], Any] = _as_it_is,
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
            raise TypeError("reset must give (observation, info), as in Gymnasium")
        return TextStep(self._render(answer[0]))

    def _next(self, answer: Any) -> TextStep:
        if not (isinstance(answer, tuple) and len(answer) == 5):
            raise TypeError("step must give (observation, reward, terminated, truncated, info), as in Gymnasium")
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
    """From factory paths, for the config of a task whose environment does not speak text.

    >>> lake = make_gym("gymnasium:make", {"id": "FrozenLake-v1", "is_slippery": False}, "builtins:str", "builtins:int")
    >>> lake.reset(Prompt("1", "lake", 1)).observation, lake.step("1").observation, lake.step("south").observation
    ('0', '4', "invalid literal for int() with base 10: 'south'")
    """
    return GymEnvironment(
        load(make)(**(settings or {})),
        load(render_text) if render_text else _as_it_is,
        load(parse_action) if parse_action else _as_it_is,
    )


def adapted(environment: Any) -> AnyTextEnvironment:
    """What a task's factory built, as the seat takes it. Gymnasium's form is known by `reset(seed=…)`."""
    reset = environment.reset
    return GymEnvironment(environment) if _takes_seed(getattr(reset, "__func__", reset)) else environment


@lru_cache(maxsize=64)
def _takes_seed(reset: Callable[..., Any]) -> bool:
    return "seed" in inspect.signature(reset).parameters


def _then(answer: Any, convert: Callable[[Any], TextStep]) -> TextStep | Awaitable[TextStep]:
    """Convert it now, or when it is there."""
    if not inspect.isawaitable(answer):
        return convert(answer)

    async def later() -> TextStep:
        return convert(await answer)

    return later()
