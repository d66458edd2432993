"""The Worker port: the interface of engines, environment hosts, reward functions and trainers to their runtime.

A worker is a state machine that takes commands and returns events; it owns no task and no clock. The same interface is
driven in virtual time (the runtime jumps to `wake_at`), by a thread of this process, and inside a Ray actor. The roles
differ only in their messages (`types.messages`), which is what their conformance suites check.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from rollart.types.messages import WorkerCommand, WorkerEvent, WorkerInfo


class Advance(msgspec.Struct, frozen=True, gc=False):
    """Result of one slice of work."""

    events: list[WorkerEvent]
    wake_at: float | None
    """When to call again: now or earlier = at once, None = when a command arrives or `wake` is called."""


class Worker(Protocol):
    """Called by one thread at a time, not re-entrant."""

    def info(self) -> WorkerInfo:
        """Capabilities of this worker; called once, when it joins."""
        ...

    def post(self, commands: Sequence[WorkerCommand]) -> None:
        """Accept commands, in order. Fast: the work happens in `advance`."""
        ...

    def advance(self, now: float) -> Advance:
        """Do one slice of work (for example one engine step) and return the events that are due at `now`."""
        ...

    def close(self) -> None:
        """Free all resources. Called once, also after a failure."""
        ...


WorkerFactory = Callable[[Mapping[str, Any], Callable[[], None]], Worker]
"""`factory(settings, wake)`; `wake` may be called from any thread to request another `advance`."""
