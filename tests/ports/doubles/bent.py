"""A worker whose commands and events pass through filters: the base of all worker doubles."""

from collections.abc import Callable, Sequence

import msgspec

from rollart.ports.worker import Advance, Worker
from rollart.types.messages import WorkerCommand, WorkerEvent, WorkerInfo

Build = Callable[[Callable[[], None]], Worker]
replace = msgspec.structs.replace


class Bent:
    """A worker whose commands and events pass through `command` and `event`; those of this class change nothing."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def info(self) -> WorkerInfo:
        return self.worker.info()

    def post(self, commands: Sequence[WorkerCommand]) -> None:
        self.worker.post([kept for command in commands for kept in self.command(command)])

    def advance(self, now: float) -> Advance:
        advance = self.worker.advance(now)
        return Advance([kept for event in advance.events for kept in self.event(event)], advance.wake_at)

    def close(self) -> None:
        self.worker.close()

    def command(self, command: WorkerCommand) -> list[WorkerCommand]:
        return [command]

    def event(self, event: WorkerEvent) -> list[WorkerEvent]:
        return [event]


def bend(build: Build, double: Callable[[Worker], Bent]) -> Build:
    return lambda wake: double(build(wake))
