"""Ctrl-C and SIGTERM: the first stops the run gracefully, the second exits the process at once.

Invariants: the event loop is never interrupted in the middle of a callback; the run is cancelled and ends in the normal
way, with its workers stopped and its journal flushed. Exiting at once loses no more than a kill: files on disk are
complete, and workers in other processes end with this one.

For a caller inside an event loop, such as a notebook cell, the run has its own thread (`in_own_thread`). There the
second signal does not exit the process, which holds more of the user's state than the run: the call returns with a
`KeyboardInterrupt` while the run continues to stop.
"""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SHOW_CURSOR = "\x1b[?25h"
T = TypeVar("T")


class Interruption:
    """Context manager that handles the signals. Does nothing outside the main thread, which gets no signals."""

    def __init__(self, say: Callable[[str], None], *, own_thread: bool = False) -> None:
        """`own_thread`: the run is in a different thread than the block."""
        self._say = say
        self._own_thread = own_thread
        self._heard = False
        self._cancel: Callable[[], object] | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            handlers = {number: signal.getsignal(number) for number in SIGNALS}
            # Signals that were ignored, as under `nohup` or in a shell's background, stay ignored.
            self._before = {number: handler for number, handler in handlers.items() if handler is not signal.SIG_IGN}
        self._listen()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def cancels(self, run: Coroutine[Any, Any, None]) -> None:
        """Run in a new event loop; a signal cancels the run and raises `KeyboardInterrupt` in the caller."""
        if not self._own_thread:
            self._listen()  # again: libraries started meanwhile may have installed their own handlers
        try:
            asyncio.run(self._cancellable(run))
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
        finally:
            self._cancel = None

    async def _cancellable(self, run: Coroutine[Any, Any, None]) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)
        if self._heard:  # before there was anything to cancel
            run.close()
            raise asyncio.CancelledError
        await run

    def _listen(self) -> None:
        for number in self._before:
            signal.signal(number, self._signalled)

    def _signalled(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if self._heard:
            if self._own_thread:
                raise KeyboardInterrupt
            if sys.stderr.isatty():
                sys.stderr.write(SHOW_CURSOR)
            os._exit(1)
        self._heard = True
        self._say("stopping; interrupt again to " + ("stop waiting for it" if self._own_thread else "exit at once"))
        if self._cancel is not None:
            self._cancel()
        elif not self._own_thread:
            raise KeyboardInterrupt


def in_own_thread(say: Callable[[str], None], work: Callable[[Interruption], T]) -> T:
    """Do `work`, which runs its own event loop, in a new thread, for a caller that is already inside a loop.

    Returns its result or raises its exception. The caller's loop is blocked meanwhile.
    """
    done: Future[T] = Future()

    def body(interruption: Interruption) -> None:
        try:
            done.set_result(work(interruption))
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            done.set_exception(error)

    with Interruption(say, own_thread=True) as interruption:
        threading.Thread(target=body, args=(interruption,), name="rollart run", daemon=True).start()
        return done.result()
