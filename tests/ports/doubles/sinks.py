"""Event sinks that break one promise each, and the correct one that they derive from."""

import asyncio

from rollart.ports.sink import EventSink
from rollart.types.journal import JournalEvent


class ListSink:
    """A correct sink over a list: `durable` is what a reader finds. `broken` is a full disk."""

    def __init__(self) -> None:
        self.waiting: list[JournalEvent] = []
        self.durable: list[JournalEvent] = []
        self.broken = False

    def append(self, event: JournalEvent) -> None:
        self.waiting.append(event)

    async def flush(self) -> None:
        await asyncio.sleep(0)
        if self.broken and self.waiting:
            raise OSError("disk full")
        self.durable += self.waiting
        self.waiting.clear()

    async def close(self) -> None:
        await ListSink.flush(self)


class FlushesLater(ListSink):
    """`flush` returns before anything is durable."""

    async def flush(self) -> None:
        pass


class ForgetsTheRest(ListSink):
    """`close` frees everything, and what was not flushed with it."""

    async def close(self) -> None:
        self.waiting.clear()


class DropsWhenFull(ListSink):
    """Takes a thousand events at a time."""

    def append(self, event: JournalEvent) -> None:
        if len(self.waiting) < 1000:
            super().append(event)


class HidesFullDisk(ListSink):
    """What cannot be written is forgotten."""

    async def flush(self) -> None:
        if self.broken:
            self.waiting.clear()
        await super().flush()


def sink_is_correct() -> EventSink:
    """The type checker's word that the fake above is a sink."""
    return ListSink()
