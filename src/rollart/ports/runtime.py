"""The Runtime port: the only thing that starts and stops workers.

Workers are named by a factory path (`package.module:callable`), so that another process can build them. Commands posted
in one pass of the event loop travel together; events come back together.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rollart.types.ids import WorkerId
from rollart.types.messages import Role, WorkerCommand, WorkerEvent, WorkerInfo


class Listener(Protocol):
    """Who hears of workers. Always called on the controller's event loop, never from inside a Runtime call."""

    def joined(self, worker: WorkerId, info: WorkerInfo) -> None:
        """The worker is built and takes commands. The first thing ever heard of it, unless it dies before."""
        ...

    def events(self, worker: WorkerId, events: Sequence[WorkerEvent]) -> None:
        """In the order in which the worker gave them."""
        ...

    def died(self, worker: WorkerId, reason: str) -> None:
        """The last thing ever heard of it. A worker that was asked to stop does not die."""
        ...


class Runtime(Protocol):
    """Hosts workers. A worker that raises is dead; it takes no other with it."""

    def listen(self, listener: Listener) -> None:
        """Say who hears of workers; once, before the first `spawn`."""
        ...

    def spawn(self, worker: WorkerId, role: Role, factory: str, settings: Mapping[str, Any]) -> None:
        """Start a worker; `joined` or `died` follows, the latter for a bad factory path too.

        The id must be new: a used one raises `InvariantBroken`.
        """
        ...

    def post(self, worker: WorkerId, commands: Sequence[WorkerCommand]) -> None:
        """Send commands, in order. To a worker that is gone: nothing happens (`died` was or will be told)."""
        ...

    def stop(self, worker: WorkerId) -> None:
        """End a worker; nothing is heard of it any more. One that is gone: nothing happens."""
        ...

    async def close(self) -> None:
        """End every worker."""
        ...
