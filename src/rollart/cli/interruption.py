"""Ctrl-C and SIGTERM: the first stops the run in order, the second ends the process at once.

What holds: the event loop is never broken off in the middle of a callback; the run is cancelled and ends as it always
does, its workers stopped and its journal flushed. Ending at once loses no more than a kill does: what is on disk is
whole, and workers in other processes end with this one.
"""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from types import FrameType, TracebackType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SHOW_CURSOR = "\x1b[?25h"


class Interruption:
    """From `with` to the end of its block. Outside the main thread there are no signals, and this does nothing."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._heard = False
        self._cancel: Callable[[], object] | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            handlers = {number: signal.getsignal(number) for number in SIGNALS}
            # What was to be ignored, as `nohup` and a shell's background ask for, stays ignored.
            self._before = {number: handler for number, handler in handlers.items() if handler is not signal.SIG_IGN}
        self._listen()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def cancels(self, run: Coroutine[Any, Any, None]) -> None:
        """Do the run in an event loop of its own; a signal cancels it, which is a `KeyboardInterrupt` to the caller."""
        self._listen()  # again: what was started meanwhile may have put handlers of its own
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
        await run

    def _listen(self) -> None:
        for number in self._before:
            signal.signal(number, self._signalled)

    def _signalled(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if self._heard:
            if sys.stderr.isatty():
                sys.stderr.write(SHOW_CURSOR)
            os._exit(1)
        self._heard = True
        self._say("stopping; once more ends it at once")
        if self._cancel is None:
            raise KeyboardInterrupt
        self._cancel()
