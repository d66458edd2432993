"""The EventSink port: the destination of the journal.

`append` never blocks and never fails: write errors are raised by the next `flush`, which the pipeline awaits before it
acts on a claim.
"""

from typing import Protocol

from rollart.types.journal import JournalEvent


class EventSink(Protocol):
    """Keeps events in the order of `append`, each once."""

    def append(self, event: JournalEvent) -> None: ...

    async def flush(self) -> None:
        """Return once everything appended so far is durable."""
        ...

    async def close(self) -> None:
        """Flush, then free all resources."""
        ...
