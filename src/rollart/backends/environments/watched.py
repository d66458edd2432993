"""An environment host whose observations can be read as text, for scripted players of any task."""

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from rollart.backends.environments.host import EnvironmentHost
from rollart.ports.environment import AnyTextEnvironment, TextStep
from rollart.types.messages import Reset
from rollart.types.trajectory import Prompt


class WatchedHost(EnvironmentHost):
    """`observe` is called with every answer of an environment, in the environment's thread, before its event."""

    def __init__(
        self, settings: Mapping[str, Any], wake: Callable[[], None], observe: Callable[[TextStep], None]
    ) -> None:
        self._observe = observe
        super().__init__(settings, wake)

    def _build(self, reset: Reset) -> AnyTextEnvironment:
        return _Watched(super()._build(reset), self._observe)


class _Watched:
    def __init__(self, environment: AnyTextEnvironment, observe: Callable[[TextStep], None]) -> None:
        self._environment = environment
        self._observe = observe

    def reset(self, prompt: Prompt) -> TextStep | Awaitable[TextStep]:
        return self._seen(self._environment.reset(prompt))

    def step(self, action: str) -> TextStep | Awaitable[TextStep]:
        return self._seen(self._environment.step(action))

    def close(self) -> Awaitable[None] | None:
        return self._environment.close()

    def _seen(self, answer: TextStep | Awaitable[TextStep]) -> TextStep | Awaitable[TextStep]:
        if inspect.isawaitable(answer):
            return self._later(answer)
        self._observe(answer)
        return answer

    async def _later(self, answer: Awaitable[TextStep]) -> TextStep:
        step = await answer
        self._observe(step)
        return step
