"""The Worker port: what every engine, environment host, reward function and trainer is to the runtime that hosts it.

A worker is a machine that takes commands and gives events: it owns no task and no clock. The same interface is driven
in virtual time (the runtime jumps to `wake_at`), by a thread of this process, and inside a Ray actor. The roles differ
only in the messages they speak (`types.messages`), which is what their conformance suites check.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from rollart.types.messages import WorkerCommand, WorkerEvent, WorkerInfo


class Advance(msgspec.Struct, frozen=True, gc=False):
    """What one slice of work gave."""

    events: list[WorkerEvent]
    wake_at: float | None
    """When to be called again: now or earlier = at once, None = when a command arrives or `wake` is called."""


class Worker(Protocol):
    """Called by one thread at a time, never re-entered."""

    def info(self) -> WorkerInfo:
        """What this worker can do; asked once, when it joins."""
        ...

    def post(self, commands: Sequence[WorkerCommand]) -> None:
        """Take commands, in order. Quick: the work happens in `advance`."""
        ...

    def advance(self, now: float) -> Advance:
        """Do one slice of work (one engine step, say) and give the events that are due at `now`."""
        ...

    def close(self) -> None:
        """Free everything. Called once, also after a failure."""
        ...


WorkerFactory = Callable[[Mapping[str, Any], Callable[[], None]], Worker]
"""`factory(settings, wake)`; `wake` may be called from any thread to be driven again."""
