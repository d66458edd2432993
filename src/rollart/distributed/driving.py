"""The loop in which a thread drives a worker, the same in this process and in a separate one.

    give ──► mailbox ──► Worker.post, Worker.advance ──► Reports: joined, events, died
    wake ──► calls `advance` at once

Invariants: a worker is built, driven and closed by the one thread that calls `run`. Any exception is the worker's
death, reported once and last; `close` follows, once, if the worker was built.
"""

import logging
import math
import threading
from collections.abc import Callable
from typing import Protocol

from rollart.ports.worker import Worker
from rollart.types.messages import WorkerCommand, WorkerEvent, WorkerInfo

logger = logging.getLogger(__name__)

LONGEST_SLEEP_S = 3600.0
"""Maximum sleep, since a lock cannot wait arbitrarily long; a worker that asks for more is polled once an hour."""


class Reports(Protocol):
    """Observer of one worker, called in the thread that drives it."""

    def joined(self, info: WorkerInfo) -> None: ...

    def events(self, events: list[WorkerEvent]) -> None: ...

    def died(self, reason: str) -> None: ...


class Drive:
    """Loop and mailbox of one worker. The state is guarded by `_changed`."""

    def __init__(
        self, name: str, build: Callable[[Callable[[], None]], Worker], clock: Callable[[], float], reports: Reports
    ) -> None:
        """`build(wake)` makes the worker; an exception in it is the worker's death too."""
        self._name = name
        self._build = build
        self._clock = clock
        self._reports = reports
        self._changed = threading.Condition()
        self._mailbox: list[WorkerCommand] = []
        self._woken = False
        self._ended = False

    # --- from any thread

    def give(self, commands: list[WorkerCommand]) -> None:
        with self._changed:
            self._mailbox.extend(commands)
            self._changed.notify()

    def wake(self) -> None:
        with self._changed:
            self._woken = True
            self._changed.notify()

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify()

    # --- in the worker's thread

    def run(self) -> None:
        """Build the worker, drive it until `end` or its death, close it."""
        built: Worker | None = None
        try:
            built = self._build(self.wake)
            self._reports.joined(built.info())
            self._drive(built)
        except BaseException as error:  # the boundary of the worker's code: its error is its death, reported below
            logger.info("worker %s died", self._name, exc_info=True)
            self._reports.died(f"{type(error).__name__}: {error}")
        if built is None:
            return
        try:
            built.close()
        except BaseException as error:  # noqa: BLE001 - the worker is over; the error can only be logged
            logger.warning("worker %s failed to close: %s: %s", self._name, type(error).__name__, error)

    def _drive(self, worker: Worker) -> None:
        wake_at: float | None = -math.inf  # once after joining, so that the worker can choose its first wake-up
        while True:
            commands = self._wait(wake_at)
            if commands is None:
                return
            if commands:
                worker.post(commands)
            advance = worker.advance(self._clock())
            wake_at = advance.wake_at
            if advance.events:
                self._reports.events(advance.events)

    def _wait(self, wake_at: float | None) -> list[WorkerCommand] | None:
        """Sleep until there is work; None to end."""
        with self._changed:
            while not (self._ended or self._mailbox or self._woken):
                if wake_at is None:
                    self._changed.wait()
                    continue
                left_s = wake_at - self._clock()
                if left_s <= 0:
                    break
                self._changed.wait(min(left_s, LONGEST_SLEEP_S))
            if self._ended:
                return None
            commands, self._mailbox = self._mailbox, []
            self._woken = False
            return commands
