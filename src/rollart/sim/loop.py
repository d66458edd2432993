"""An asyncio event loop whose clock jumps to the next timer.

Nothing ever sleeps: when no callback is ready, time is set to exactly the next timer. The order of callbacks depends
only on the program, so the same program gives the same run in every process. When nothing is ready and no timer is
left, the loop raises `VirtualDeadlock` instead of hanging.
"""

import asyncio
import heapq
import math
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from typing import Any, TypeVar, TypeVarTuple

from rollart.types.errors import StalledRun

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


_MANY = 100
"""Number of cancelled timers below which no clean-up is worthwhile."""
_PER_SECOND = 16
"""Timers of the same sixteenth of a second are sorted together, once their time has come."""


class VirtualDeadlock(StalledRun):
    """Every task waits for something that no timer will trigger."""


class _NoSelector:
    """Stand-in for a loop's I/O selector; there is no I/O."""

    def close(self) -> None:
        pass


class Alarm:
    """Minimal handle that the loop can run: `_run` is called unless `_cancelled` is set by then.

    For very frequent callbacks. An alarm may be set again once it has run, runs in no context of its own, and an error
    in it ends the loop.
    """

    __slots__ = ("_cancelled",)

    def __init__(self) -> None:
        self._cancelled = False

    def _run(self) -> None:
        raise NotImplementedError


class _Timers:
    """Timers and a parallel array of their negated times, so that, once sorted, the last one comes next.

    Two flat lists instead of an object per timer: a large run has a timer for every worker, and they are not touched
    again before their time has come.
    """

    __slots__ = ("handles", "times")

    def __init__(self) -> None:
        self.times = array("d")
        self.handles: list[asyncio.TimerHandle | Alarm] = []

    def add(self, when: float, handle: "asyncio.TimerHandle | Alarm") -> None:
        """Add a timer, unsorted."""
        self.times.append(-when)
        self.handles.append(handle)

    def insert(self, when: float, handle: "asyncio.TimerHandle | Alarm") -> None:
        """Insert a timer among sorted ones: to run after those of the same time, so before them in the list."""
        place = bisect_left(self.times, -when)
        self.times.insert(place, -when)
        self.handles.insert(place, handle)

    def sort(self) -> None:
        """Sort timers that are in insertion order; those of the same time keep it."""
        times, handles = self.times, self.handles
        order = sorted(range(len(times) - 1, -1, -1), key=times.__getitem__)
        self.times = array("d", [times[place] for place in order])
        self.handles = [handles[place] for place in order]

    def without_cancelled(self) -> "_Timers":
        kept = _Timers()
        for time, handle in zip(self.times, self.handles, strict=True):
            if not handle._cancelled:
                kept.times.append(time)
                kept.handles.append(handle)
        return kept


class _Soon(asyncio.Handle):
    """Handle returned by `call_soon`, without debugging fields: a run creates two for every turn."""

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
        except BaseException as error:  # noqa: BLE001 - as in every asyncio loop: reported, and the loop goes on
            self._loop.call_exception_handler(
                {"message": f"Exception in callback {self._callback!r}", "exception": error, "handle": self}
            )


class VirtualLoop(asyncio.BaseEventLoop):
    """Single-threaded: `call_soon_threadsafe` is `call_soon`, and there is no I/O.

    A run in virtual time mostly sets timers and runs callbacks, so both are reimplemented here: the base class compares
    timers in Python, with an undefined order among equal ones. Here timers of the same time run in the order in which
    they were set. A single heap would be the largest cost of a large run, because it spreads over all memory: only the
    next timers are sorted, the rest are kept in insertion order.
    """

    _ready: "deque[asyncio.Handle | Alarm]"
    _stopping: bool
    _closed: bool

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._timers = _Timers()
        """Sorted: all timers up to the end of slice `_slice`."""
        self._slice = -1
        self._later: dict[int, _Timers] = {}
        """The other timers, by slice, unsorted."""
        self._slices: list[int] = []
        """Heap of the keys of `_later`."""
        self._set = 0
        """Number of timers, including cancelled ones."""
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
        number = int(when * _PER_SECOND)
        self._set += 1
        if number <= self._slice:
            self._timers.insert(when, timer)
            return
        waiting = self._later.get(number)
        if waiting is None:
            waiting = self._later[number] = _Timers()
            heapq.heappush(self._slices, number)
        waiting.add(when, timer)

    def _next_at(self) -> float:
        """Time of the next timer, which is then last in `_timers`; infinite if there is none. Drops cancelled ones."""
        while True:
            timers = self._timers
            while timers.handles and timers.handles[-1]._cancelled:
                timers.times.pop()
                timers.handles.pop()
                self._set -= 1
                self._cancelled -= 1
            if timers.handles:
                return -timers.times[-1]
            if not self._slices:
                return math.inf
            self._slice = heapq.heappop(self._slices)
            self._timers = self._later.pop(self._slice)
            self._timers.sort()

    def alarm_soon(self, alarm: Alarm) -> None:
        """Run `alarm` in the next pass of the loop, in order with `call_soon` callbacks."""
        self._ready.append(alarm)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        if handle._scheduled:  # type: ignore[attr-defined]
            self._cancelled += 1

    def _run_once(self) -> None:
        """Run until stopped, pass by pass: advance the clock if nothing is ready, then run what is ready now.

        Callbacks added in a pass run in the next one, after the timers that are due by then. The base class makes one
        pass per call; an agent's turn takes six.
        """
        ready = self._ready
        while True:
            timers = self._timers
            sure = timers.handles and not timers.handles[-1]._cancelled
            when = -timers.times[-1] if sure else self._next_at()
            if when > self._now and not ready and not self._stopping:
                if when == math.inf:
                    self.raise_deadlock()
                self._now = when
            if when <= self._now:
                self._ring(self._now)
            for _ in range(len(ready)):
                handle = ready.popleft()
                if not handle._cancelled:
                    handle._run()
            if self._stopping:
                return

    def _ring(self, now: float) -> None:
        """Make due timers ready; only the first slice can have any."""
        times, handles = self._timers.times, self._timers.handles
        before = len(handles)
        while handles and -times[-1] <= now:
            times.pop()
            handle = handles.pop()
            if handle._cancelled:
                self._cancelled -= 1
            else:
                if type(handle) is asyncio.TimerHandle:
                    handle._scheduled = False  # type: ignore[attr-defined]
                self._ready.append(handle)
        self._set -= before - len(handles)
        if self._cancelled > _MANY and 2 * self._cancelled > self._set:
            self._drop_cancelled()

    def _drop_cancelled(self) -> None:
        self._timers = self._timers.without_cancelled()
        kept = {number: timers.without_cancelled() for number, timers in self._later.items()}
        self._later = {number: timers for number, timers in kept.items() if timers.handles}
        self._slices = sorted(self._later)
        self._set = sum(len(timers.handles) for timers in (self._timers, *self._later.values()))
        self._cancelled = 0

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the virtual loop is closed")

    def close(self) -> None:
        super().close()
        self._timers = _Timers()
        self._later.clear()
        self._slices.clear()

    def raise_deadlock(self) -> None:
        tasks = sorted(task.get_name() for task in asyncio.all_tasks(self))
        raise VirtualDeadlock(
            f"nothing is scheduled at {self._now:.3f} s of virtual time, and these tasks still wait: "
            f"{', '.join(tasks) or 'none'}. A wait without a deadline is a bug in rollart."
        )

    def _write_to_self(self) -> None:
        pass


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to completion in virtual time, starting at 0."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(main)
    finally:
        cancel_rest(loop)
        loop.close()


def cancel_rest(loop: VirtualLoop) -> None:
    """Let tasks left behind by the main coroutine run their `finally` blocks, in order of name."""
    rest = sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name())
    for task in rest:
        task.cancel()
    if rest:
        loop.run_until_complete(asyncio.gather(*rest, return_exceptions=True))
