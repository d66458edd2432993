"""An asyncio event loop whose clock jumps to the next timer.

Nothing ever sleeps: when no callback is ready, time is set to exactly the moment of the next timer. The order of
callbacks depends on nothing but the program, so the same program gives the same run in every process. When nothing is
ready and no timer is left, nothing can ever happen again: the loop raises `VirtualDeadlock` instead of hanging.
"""

import asyncio
import heapq
import math
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple

from rollart.types.errors import StalledRun

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class VirtualDeadlock(StalledRun):
    """Every task waits for something that no timer will bring."""


class _JumpingSelector:
    """Stands where a loop waits for I/O; here there is none, so waiting is moving the clock."""

    def __init__(self, loop: "VirtualLoop") -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            self._loop.raise_deadlock()
        elif timeout > 0:
            self._loop.jump()
        return []

    def close(self) -> None:
        pass


class _Timer(asyncio.TimerHandle):
    """Timers of the same moment run in the order in which they were set; asyncio's own heap does not promise that."""

    __slots__ = ("number",)
    number: int

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, _Timer):
            return NotImplemented
        if self._when == other._when:  # type: ignore[attr-defined]
            return self.number < other.number
        return bool(self._when < other._when)  # type: ignore[attr-defined]


class VirtualLoop(asyncio.BaseEventLoop):
    """Single-threaded: `call_soon_threadsafe` is `call_soon`, and there is no I/O."""

    # Timers that asyncio keeps sorted in a heap; named here because the loop jumps to the first of them.
    _scheduled: list[asyncio.TimerHandle]

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._timers = 0
        self._selector = _JumpingSelector(self)

    def time(self) -> float:
        return self._now

    @property
    def _clock_resolution(self) -> float:
        """asyncio runs a timer when `when < time + resolution`. Jumps land exactly on `when`, so the smallest step of a
        float keeps a timer from running early, and from never running at large times."""
        return math.ulp(self._now)

    @_clock_resolution.setter
    def _clock_resolution(self, value: float) -> None:
        """The base class sets it to that of the real clock, which does not matter here."""

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        if self.is_closed():
            raise RuntimeError("the virtual loop is closed")
        timer = _Timer(when, callback, args, self, context)
        timer.number = self._timers = self._timers + 1
        heapq.heappush(self._scheduled, timer)
        timer._scheduled = True  # type: ignore[attr-defined]
        return timer

    def jump(self) -> None:
        """Move the clock to the first timer."""
        if self._scheduled:
            self._now = max(self._now, self._scheduled[0].when())

    def raise_deadlock(self) -> None:
        tasks = sorted(task.get_name() for task in asyncio.all_tasks(self))
        raise VirtualDeadlock(
            f"nothing is scheduled at {self._now:.3f} s of virtual time, and these tasks still wait: "
            f"{', '.join(tasks) or 'none'}. A wait without a deadline is a bug of rollart."
        )

    def _process_events(self, event_list: list[Any]) -> None:
        pass

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
