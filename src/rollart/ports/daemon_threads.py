"""Threads for user code that may hang: daemons, which do not keep the process."""

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from rollart.ports.reward_call import shown

A = TypeVar("A")
T = TypeVar("T")


class DaemonThreads:
    """Threads that start when needed, are reused, and do not keep the process when a function hangs.

    Each has an event loop of its own, for functions that return something to await.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[..., Any], asyncio.Future[Any], Any] | None]
        self._jobs = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._busy = 0

    async def run(self, function: Callable[[A, asyncio.Runner], T], argument: A) -> T:
        """Call the function in a thread, with the loop of that thread."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        with self._lock:
            self._busy += 1
            if self._busy > self._threads:
                self._threads += 1
                threading.Thread(target=self._work, name=f"reward:{self._threads}", daemon=True).start()
        self._jobs.put((function, future, argument))
        return await future

    def close(self) -> None:
        for _ in range(self._threads):
            self._jobs.put(None)

    def _work(self) -> None:
        with asyncio.Runner() as runner:
            while (job := self._jobs.get()) is not None:
                function, future, argument = job
                result: Any = None
                problem: BaseException | None = None
                try:
                    result = function(argument, runner)
                except BaseException as error:  # noqa: BLE001 - user code: raised again where it is awaited
                    problem = error
                with self._lock:
                    self._busy -= 1
                loop = future.get_loop()
                if not loop.is_closed():
                    loop.call_soon_threadsafe(_settle, future, result, problem)


def _settle(future: "asyncio.Future[Any]", result: Any, problem: BaseException | None) -> None:
    if future.done():
        return
    if problem is None:
        future.set_result(result)
    elif isinstance(problem, StopIteration | asyncio.CancelledError | KeyboardInterrupt | SystemExit):
        # What a future cannot carry, or the loop would take for its own.
        future.set_exception(RuntimeError(f"{type(problem).__name__}: {shown(problem)}"))
    else:
        future.set_exception(problem)
