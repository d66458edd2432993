"""One ordered nursery for every coroutine of a run.

A child that fails ends the run: the main coroutine is cancelled, then the children in the order in which they were
started, each awaited before the next. Nothing outlives `run`, no error is lost, and the order is the same in every
process (`asyncio.TaskGroup` cancels in the order of a set).
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Nursery:
    def __init__(self) -> None:
        self._children: dict[asyncio.Task[Any], None] = {}
        self._main: asyncio.Task[Any] | None = None
        self._error: BaseException | None = None

    def __len__(self) -> int:
        return len(self._children)

    def start(self, coroutine: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Run a child until it ends or `run` does."""
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._children[task] = None
        task.add_done_callback(self._child_done)
        return task

    def fail(self, error: BaseException) -> None:
        """End the run with this error; the first one counts."""
        if self._error is None:
            self._error = error
            if self._main is not None:
                self._main.cancel()

    async def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run `main` and everything it starts; raises the first error of any of them."""
        task = asyncio.get_running_loop().create_task(main, name="main")
        self._main = task
        try:
            return await task
        except asyncio.CancelledError:
            if self._error is None:
                raise
            raise self._error from None
        finally:
            task.cancel()
            for child in list(self._children):
                child.cancel()
                # The outcome was or will be taken by `_child_done`; here it only has to be over.
                await asyncio.gather(child, return_exceptions=True)

    def _child_done(self, task: asyncio.Task[Any]) -> None:
        self._children.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)
