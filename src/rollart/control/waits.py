"""Every wait of the control plane: with an owner, a deadline and an action.

One timer serves all waits. At the deadline `wait` raises the fault named by the caller, and `guard` calls back.
"""

import asyncio
import math
from collections.abc import Callable
from typing import TypeVar

from rollart.control.nursery import Boundary
from rollart.policy.watch import Wait, Watch
from rollart.types.errors import OVERDUE, Fault, RollartError
from rollart.types.failures import FailureKind

T = TypeVar("T")


class Waits:
    """The open waits of a run, and the timer of the next deadline."""

    def __init__(self, loop: asyncio.AbstractEventLoop, boundary: Boundary) -> None:
        self._loop = loop
        self._boundary = boundary
        self._watch = Watch()
        self._timer: asyncio.TimerHandle | None = None
        self._armed_for = math.inf
        self.close = self._watch.close
        """Close a wait; idempotent."""

    def open(self, wait: Wait, owner: object, what: str, seconds: float, action: str) -> None:
        """Open a wait that the caller owns; unless closed first, its `act` is called at the deadline."""
        self._watch.open(owner, what, seconds, action, self._loop.time(), wait)
        if wait.deadline < self._armed_for:
            self._arm(wait.deadline)

    def guard(self, owner: str, what: str, seconds: float, action: str, expired: Callable[[Wait], None]) -> Wait:
        """Open a new wait; unless closed first, `expired` is called at its deadline."""
        wait = Wait(expired)
        self.open(wait, owner, what, seconds, action)
        return wait

    async def wait(
        self,
        future: "asyncio.Future[T]",
        owner: str,
        what: str,
        seconds: float,
        action: str,
        raises: type[RollartError],
    ) -> T:
        """The future's result; at the deadline the future fails with `raises`."""
        wait = self.guard(owner, what, seconds, action, lambda wait: fail(future, wait, raises))
        try:
            return await future
        finally:
            self.close(wait)

    def report(self, limit: int = 20) -> list[str]:
        """Open waits, longest first, for the stall report."""
        return self._watch.report(self._loop.time(), limit)

    def _arm(self, deadline: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if deadline is None else self._loop.call_at(deadline, self._ring)
        self._armed_for = math.inf if deadline is None else deadline

    def _ring(self) -> None:
        for wait in self._watch.expired(self._loop.time()):
            if wait.act is not None:
                with self._boundary:
                    wait.act(wait)
        self._arm(self._watch.next_deadline())


def fail(future: "asyncio.Future[T]", wait: Wait, raises: type[RollartError]) -> None:
    """Fail a future whose deadline passed with the fault that its owner expects."""
    if not future.done():
        message = f"{wait.owner}: {wait.what} {OVERDUE} {wait.seconds:g} s; {wait.action}"
        error = raises(message)
        if isinstance(error, Fault):
            error.kind = FailureKind.DEADLINE
        future.set_exception(error)
