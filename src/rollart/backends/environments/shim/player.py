"""One environment at a time, played for a worker in another interpreter.

Invariant: an answer is made of plain data, checked where the environment's own types are known; it is converted to a
`TextStep` on the other side.
"""

import asyncio
import base64
import inspect
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from rollart.backends.environments.checked import problem
from rollart.backends.environments.gym import as_text_environment
from rollart.types.errors import WRONG_CODE

logger = logging.getLogger(__name__)


class Prompt(NamedTuple):
    """What an episode starts from; stands for `rollart.Prompt`."""

    id: str
    task: str
    seed: int
    data: dict[str, Any]


class BadAnswer(Exception):
    """An environment returned something that is not a step."""


class Player:
    """Used by one thread. `build` makes an environment, a fresh one for every episode."""

    def __init__(self, build: Callable[[], Any]) -> None:
        self._build = build
        self._environment: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        """Event loop of an async environment."""
        self.close_failure = ""
        """Why an environment failed to close, the last one that did."""

    def reset(self, prompt: dict[str, Any]) -> list[Any]:
        self.close()
        self._environment = as_text_environment(self._build())
        return self._act(lambda environment: environment.reset(Prompt(**prompt)))

    def step(self, action: str) -> list[Any]:
        return self._act(lambda environment: environment.step(action))

    def call(self, method: str, arguments: list[Any]) -> Any:
        """Result of a method of the environment; None if it has no such method."""
        elsewhere = getattr(self._environment, "call", None)
        if elsewhere is not None:  # it is in another process
            return elsewhere(method, *arguments)
        found = getattr(self._environment, method, None)
        return None if found is None else found(*arguments)

    def build_and_close(self) -> None:
        self._environment = as_text_environment(self._build())
        self.close()

    def close(self) -> None:
        environment, self._environment = self._environment, None
        if environment is None:
            return
        try:
            try:
                self._wait(environment.close())
            finally:
                self._end_loop()
        except BaseException as error:  # noqa: BLE001 - the episode is over; only a reader of the log can act on this
            self.close_failure = f"{type(error).__name__}: {error}"
            logger.warning("an environment failed to close: %s", self.close_failure)

    def _act(self, call: Callable[[Any], Any]) -> list[Any]:
        try:
            return plain(self._wait(call(self._environment)))
        except BaseException:
            self.close()
            raise

    def _wait(self, answer: Any) -> Any:
        """Result of a call; a coroutine runs in the environment's own event loop."""
        if not inspect.isawaitable(answer):
            return answer
        if self._loop is None:
            self._loop = asyncio.new_event_loop()

        async def awaited() -> Any:
            return await answer

        return self._loop.run_until_complete(awaited())

    def _end_loop(self) -> None:
        """Cancel what still runs in the loop, as `asyncio.run` does; `asyncio.Runner` is newer than Python 3.10."""
        loop, self._loop = self._loop, None
        if loop is None:
            return
        loop.run_until_complete(_cancel_others())
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


async def _cancel_others() -> None:
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


def plain(step: Any) -> list[Any]:
    """The fields of a step as data for JSON."""
    wrong = problem(step)
    if wrong:
        raise BadAnswer(wrong)
    packed = base64.b64encode(step.artifact).decode()
    flags = [bool(step.done), bool(step.truncated), bool(step.fresh_context)]
    return [step.observation, float(step.reward), *flags, packed, step.state, list(step.tools)]


def failure(error: BaseException) -> tuple[str, bool]:
    """The reason of a failure, and whether it is permanent: the code is wrong."""
    if isinstance(error, BadAnswer):
        return str(error), True
    return f"{type(error).__name__}: {error}", isinstance(error, WRONG_CODE)
