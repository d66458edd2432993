"""One ordered nursery for every coroutine of a run.

A child that fails ends the run: the main coroutine is cancelled, then the children in start order, each awaited before
the next. Nothing outlives `run`, no error is lost, and the order is the same in every process (`asyncio.TaskGroup`
cancels in set order).

Callbacks of the loop belong to no task. They run inside `with nursery.boundary:`, which ends the run with their error;
the loop itself would only log it.
"""

import asyncio
from collections.abc import Coroutine
from contextvars import copy_context
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")


class Boundary:
    """Context manager that ends the run with any error raised inside."""

    def __init__(self, nursery: "Nursery") -> None:
        self._nursery = nursery

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self._nursery.fail(error)
        return True


class Nursery:
    def __init__(self) -> None:
        self.boundary = Boundary(self)
        self._context = copy_context()
        """Shared by all children: none sets a variable in it, and ten thousand copies would be cold memory."""
        self._children: dict[asyncio.Task[Any], None] = {}
        self._main: asyncio.Task[Any] | None = None
        self._error: BaseException | None = None

    def __len__(self) -> int:
        return len(self._children)

    def start(self, coroutine: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Run a child until it ends or `run` does."""
        task = asyncio.get_running_loop().create_task(coroutine, name=name, context=self._context)
        self._children[task] = None
        task.add_done_callback(self._child_done)
        return task

    def fail(self, error: BaseException) -> None:
        """End the run with this error; the first one counts."""
        main = self._main
        if self._error is None and not (main is not None and main.done() and _failed(main)):
            self._error = error
            if main is not None:
                main.cancel()

    async def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run `main` and everything it starts; raises the first error of any of them."""
        task = asyncio.get_running_loop().create_task(main, name="main")
        self._main = task
        try:
            result = await task
        except BaseException:
            if self._error is None:
                raise
            # The first error is the cause; what `main` raised when it was cancelled is a consequence.
            raise self._error from None
        finally:
            await self._end_children()
        if self._error is not None:
            raise self._error
        return result

    async def _end_children(self) -> None:
        # A child may start another while it ends, so not a loop over a copy.
        while self._children:
            child = next(iter(self._children))
            child.cancel()
            # The outcome was or will be taken by `_child_done`; here it only has to be over.
            await asyncio.gather(child, return_exceptions=True)

    def _child_done(self, task: asyncio.Task[Any]) -> None:
        self._children.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)


def _failed(task: asyncio.Task[Any]) -> bool:
    return not task.cancelled() and task.exception() is not None
