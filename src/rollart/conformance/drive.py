"""Drives one worker synchronously without a runtime, in virtual or in real time.

A suite sends commands and waits for specific events; the drive calls `post` and `advance` as a runtime would. In
virtual time `now` jumps to `wake_at`; in real time it waits for the clock or for `wake`. Every wait is bounded: a
worker that never answers, never becomes idle, raises, or blocks in a call is a `ConformanceError`, not a hang.
"""

import math
import queue
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple, Self, TypeVar, overload

from rollart.conformance.case import ConformanceError, check
from rollart.ports.worker import Advance, Worker
from rollart.types.messages import WorkerCommand, WorkerEvent, WorkerInfo

T = TypeVar("T")
E = TypeVar("E", bound=WorkerEvent)

VIRTUAL_PATIENCE_S = 24 * 3600.0
REAL_PATIENCE_S = 120.0
"""Long, because it costs nothing unless a worker is broken, and a busy machine is slow."""
CALL_PATIENCE_S = 240.0
"""Limit on one call of the worker, in real time; building one may import torch, in several processes."""
QUIET_S = 0.05
"""In real time, a worker without a `wake_at` counts as idle after being quiet for this long."""
MAX_SLICES = 200_000
"""Limit on slices per wait, so that a worker that always asks to be called at once is detected in virtual time too."""


class Slice(NamedTuple):
    """One call of `advance`."""

    at: float
    """The time that the worker was given."""
    events: int
    """Number of events that it returned."""


class WorkerDrive:
    """One worker and all its events so far."""

    def __init__(
        self, factory: Callable[[Callable[[], None]], Worker], *, virtual: bool, patience_s: float | None = None
    ) -> None:
        self.virtual = virtual
        self.patience_s = patience_s or (VIRTUAL_PATIENCE_S if virtual else REAL_PATIENCE_S)
        self.events: list[WorkerEvent] = []
        self.slices: list[Slice] = []
        """Every call of `advance` so far."""
        self._now = 0.0
        self._due: float | None = None
        self._woken = threading.Event()
        self._caller = _Caller()
        self._worker: Worker = self._caller.call("the factory", lambda: self._build(factory))
        self.info: WorkerInfo = self._caller.call("info()", self._worker.info)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if not self._caller.stuck:
                self._caller.call("close()", self._worker.close)
        finally:
            self._caller.stop()

    def _build(self, factory: Callable[[Callable[[], None]], Worker]) -> Worker:
        worker = factory(self._woken.set)
        if self._caller.stuck:  # the case is over; what is built too late must not be in the way of the next one
            worker.close()
        return worker

    def now(self) -> float:
        return self._now if self.virtual else time.monotonic()

    def mark(self) -> int:
        """A position in `events`, to look only at later ones."""
        return len(self.events)

    def send(self, *commands: WorkerCommand) -> None:
        """Post commands together; the work happens when the drive continues."""
        self._caller.call("post()", lambda: self._worker.post(commands))
        self._due = -math.inf

    @overload
    def until(self, wanted: type[E], *, after: int = 0, within_s: float | None = None) -> E: ...
    @overload
    def until(
        self, wanted: Callable[[WorkerEvent], bool], *, after: int = 0, within_s: float | None = None
    ) -> WorkerEvent: ...

    def until(
        self,
        wanted: type[E] | Callable[[WorkerEvent], bool],
        *,
        after: int = 0,
        within_s: float | None = None,
    ) -> WorkerEvent:
        """Drive until an event from position `after` on has this type or meets this condition; returns the
        first one."""
        seconds = self.patience_s if within_s is None else within_s
        deadline = self.now() + seconds
        looked = after
        for _ in range(MAX_SLICES):
            for event in self.events[looked:]:
                if isinstance(event, wanted) if isinstance(wanted, type) else wanted(event):
                    return event
            looked = len(self.events)
            if not self._slice(deadline):
                break
        name = wanted.__name__ if isinstance(wanted, type) else "the expected event"
        since = ", ".join(type(event).__name__ for event in self.events[after:][-8:]) or "nothing"
        raise ConformanceError(
            f"every command is answered, but {name} did not come within {seconds:g} s; last events: {since}"
        )

    def run_for(self, seconds: float) -> None:
        """Let time pass, driving the worker whenever it asks to be driven."""
        deadline = self.now() + seconds
        for _ in range(MAX_SLICES):
            if not self._slice(deadline):
                return
        raise ConformanceError(f"`wake_at` is the time of the next call, but {seconds:g} s took {MAX_SLICES} slices")

    def settle(self, quiet_s: float = QUIET_S) -> None:
        """Drive until the worker is idle. In real time: until it has been quiet for `quiet_s`."""
        deadline = self.now() + self.patience_s
        for _ in range(MAX_SLICES):
            if not self._slice(math.inf if self.virtual else self.now() + quiet_s):
                return
            if self.now() > deadline:
                break
        raise ConformanceError("an idle worker has `wake_at` None, but this one never becomes idle")

    def _slice(self, deadline: float) -> bool:
        """Call `advance` once if it is due by `deadline`; otherwise let time pass until then and return False."""
        if not self._wait(deadline):
            return False
        self._woken.clear()
        now = self.now()
        advance: Advance = self._caller.call("advance()", lambda: self._worker.advance(now))
        check(
            advance.wake_at is None or not math.isnan(advance.wake_at),
            "`wake_at` is a time or None, but it was not a number",
        )
        self.events.extend(advance.events)
        self.slices.append(Slice(now, len(advance.events)))
        self._due = advance.wake_at
        return True

    def _wait(self, deadline: float) -> bool:
        """Wait until a slice is due; False if none is due by `deadline`."""
        if self._woken.is_set():
            return True
        if self.virtual:
            if self._due is None or self._due > deadline:
                if deadline < math.inf:
                    self._now = max(self._now, deadline)
                return False
            self._now = max(self._now, self._due)
            return True
        until = deadline if self._due is None else min(self._due, deadline)
        woken = self._woken.wait(max(0.0, until - time.monotonic()))
        return woken or (self._due is not None and self._due <= deadline)


class _Caller:
    """Calls the worker on its own thread, always the same one, so that a blocking call can be detected."""

    def __init__(self) -> None:
        self.stuck = False
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[object, BaseException | None]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="conformance-drive", daemon=True).start()

    def call(self, what: str, function: Callable[[], T]) -> T:
        self._calls.put(function)
        try:
            result, error = self._results.get(timeout=CALL_PATIENCE_S)
        except queue.Empty:
            self.stuck = True
            self.stop()
            raise ConformanceError(f"no call of a worker blocks, but {what} took over {CALL_PATIENCE_S:g} s") from None
        if error is not None:
            raise ConformanceError(f"a worker that raises is dead, and {what} raised {error!r}") from error
        return result  # type: ignore[return-value]  # the result of `function`, one call at a time

    def stop(self) -> None:
        self._calls.put(None)

    def _work(self) -> None:
        while (function := self._calls.get()) is not None:
            try:
                self._results.put((function(), None))
            except BaseException as error:  # noqa: BLE001  handed to the caller, which attributes it
                self._results.put((None, error))
