"""An asyncio event loop whose clock jumps to the next timer.

Nothing ever sleeps: when no callback is ready, time is set to exactly the moment of the next timer. The order of
callbacks depends on nothing but the program, so the same program gives the same run in every process. When nothing is
ready and no timer is left, nothing can ever happen again: the loop raises `VirtualDeadlock` instead of hanging.
"""

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from typing import Any, TypeVar, TypeVarTuple

from rollart.types.errors import StalledRun

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


_MANY = 100
"""Cancelled timers that are not worth a clean-up."""
_PER_SECOND = 16
"""Timers of the same sixteenth of a second are sorted together, when their time has come."""


class VirtualDeadlock(StalledRun):
    """Every task waits for something that no timer will bring."""


class _NoSelector:
    """Stands where a loop waits for I/O; here there is none."""

    def close(self) -> None:
        pass


class Alarm:
    """The least that the loop can be given to run: `_run` is called unless `_cancelled` is set by then.

    For whoever is called very often. It may be set again once it ran, runs in no context of its own, and an error of
    it ends the loop.
    """

    __slots__ = ("_cancelled",)

    def __init__(self) -> None:
        self._cancelled = False

    def _run(self) -> None:
        raise NotImplementedError


_Entry = tuple[float, int, "asyncio.TimerHandle | Alarm"]
"""When, the how manieth that was set, and what."""


class _Soon(asyncio.Handle):
    """What `call_soon` gives: a handle without what only a debugger reads, because a run makes two for every turn."""

    __slots__ = ()
    _repr = None
    _source_traceback = None

    def __init__(
        self,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        loop: asyncio.AbstractEventLoop,
        context: Context | None,
    ) -> None:
        self._callback = callback
        self._args = args
        self._loop = loop
        self._context = copy_context() if context is None else context
        self._cancelled = False

    def _run(self) -> None:
        try:
            self._context.run(self._callback, *self._args)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # noqa: BLE001 - as every asyncio loop: said, and the loop goes on
            self._loop.call_exception_handler(
                {"message": f"Exception in callback {self._callback!r}", "exception": error, "handle": self}
            )


class VirtualLoop(asyncio.BaseEventLoop):
    """Single-threaded: `call_soon_threadsafe` is `call_soon`, and there is no I/O.

    A run in virtual time does little else than set timers and run callbacks, so both are done here and not in the base
    class: its timers are compared in Python, and in no defined order where they are equal. Here they are tuples, and
    those of the same moment run in the order in which they were set. One heap of them all would be the largest cost of
    a large run, for it is spread over all memory: there is one of those that come next, and the rest wait unsorted.
    """

    _ready: "deque[asyncio.Handle | Alarm]"
    _stopping: bool
    _closed: bool

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._timers: list[_Entry] = []
        """A heap: all timers up to the end of slice `_slice`; not empty while there is any."""
        self._slice = -1
        self._later: dict[int, list[_Entry]] = {}
        """The others, by slice."""
        self._slices: list[int] = []
        """A heap of the keys of `_later`."""
        self._set = 0
        self._cancelled = 0
        self._selector = _NoSelector()

    def time(self) -> float:
        return self._now

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        self._check_open()
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        timer._scheduled = True  # type: ignore[attr-defined]
        self._queue(when, timer)
        return timer

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        if self._closed:
            self._check_open()
        handle = _Soon(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def alarm_at(self, when: float, alarm: Alarm) -> None:
        """Run `alarm` at `when`, unless it is cancelled."""
        self._queue(when, alarm)

    def _queue(self, when: float, timer: "asyncio.TimerHandle | Alarm") -> None:
        self._set += 1
        entry = (when, self._set, timer)
        number = int(when * _PER_SECOND)
        if number <= self._slice:
            heapq.heappush(self._timers, entry)
            return
        waiting = self._later.get(number)
        if waiting is None:
            self._later[number] = [entry]
            heapq.heappush(self._slices, number)
        else:
            waiting.append(entry)

    def _next_timers(self) -> "list[_Entry]":
        """The heap with the timer that comes next, cancelled ones left out; empty if there is none."""
        timers = self._timers
        while True:
            while timers and timers[0][2]._cancelled:
                heapq.heappop(timers)
                self._cancelled -= 1
            if timers or not self._slices:
                return timers
            self._slice = heapq.heappop(self._slices)
            self._timers = timers = self._later.pop(self._slice)
            heapq.heapify(timers)

    def alarm_soon(self, alarm: Alarm) -> None:
        """Run `alarm` in the next pass of the loop, in turn with what `call_soon` was given."""
        self._ready.append(alarm)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        if handle._scheduled:  # type: ignore[attr-defined]
            self._cancelled += 1

    def _run_once(self) -> None:
        """Run until told to stop, pass by pass: move the clock if nothing is ready, then run what is ready now.

        What a pass adds runs in the next one, after the timers that are due by then. The base class would do one pass
        per call; a turn of an agent takes six.
        """
        ready = self._ready
        while True:
            timers = self._timers
            if not timers or timers[0][2]._cancelled:
                timers = self._next_timers()
            if timers:
                now = self._now
                when = timers[0][0]
                if when > now and not ready and not self._stopping:
                    self._now = now = when
                if when <= now:
                    self._ring(now)
            elif not ready and not self._stopping:
                self.raise_deadlock()
            for _ in range(len(ready)):
                handle = ready.popleft()
                if not handle._cancelled:
                    handle._run()
            if self._stopping:
                return

    def _ring(self, now: float) -> None:
        """Make ready what is due."""
        timers = self._timers
        while timers and timers[0][0] <= now:
            handle = heapq.heappop(timers)[2]
            if handle._cancelled:
                self._cancelled -= 1
            else:
                if isinstance(handle, asyncio.TimerHandle):
                    handle._scheduled = False  # type: ignore[attr-defined]
                self._ready.append(handle)
            if not timers:
                timers = self._next_timers()
        if self._cancelled > _MANY and 2 * self._cancelled > len(timers) + sum(map(len, self._later.values())):
            self._drop_cancelled()

    def _drop_cancelled(self) -> None:
        self._timers = [entry for entry in self._timers if not entry[2]._cancelled]
        heapq.heapify(self._timers)
        kept = {
            number: [entry for entry in entries if not entry[2]._cancelled] for number, entries in self._later.items()
        }
        self._later = {number: entries for number, entries in kept.items() if entries}
        self._slices = sorted(self._later)
        self._cancelled = 0

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the virtual loop is closed")

    def close(self) -> None:
        super().close()
        self._timers.clear()
        self._later.clear()
        self._slices.clear()

    def raise_deadlock(self) -> None:
        tasks = sorted(task.get_name() for task in asyncio.all_tasks(self))
        raise VirtualDeadlock(
            f"nothing is scheduled at {self._now:.3f} s of virtual time, and these tasks still wait: "
            f"{', '.join(tasks) or 'none'}. A wait without a deadline is a bug of rollart."
        )

    def _write_to_self(self) -> None:
        pass


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in virtual time, starting at 0."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(main)
    finally:
        cancel_rest(loop)
        loop.close()


def cancel_rest(loop: VirtualLoop) -> None:
    """Let tasks that the main coroutine left behind run their `finally` blocks, in the order of their names."""
    rest = sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name())
    for task in rest:
        task.cancel()
    if rest:
        loop.run_until_complete(asyncio.gather(*rest, return_exceptions=True))
