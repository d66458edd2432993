"""What every part of the control plane shares: config, clock, journal, waits, nursery and the accounts of time."""

import asyncio
from collections.abc import Callable
from typing import TypeVarTuple

from rollart.config.schema import RunConfig
from rollart.control.accounts import Accounts
from rollart.control.nursery import Nursery
from rollart.control.waits import Waits
from rollart.policy.lineage import Lineage
from rollart.ports.sink import EventSink
from rollart.types.journal import JournalEvent
from rollart.types.snapshot import RunState

Args = TypeVarTuple("Args")


class Context:
    """Made once per run, inside its loop."""

    def __init__(self, config: RunConfig, sink: EventSink, state: RunState | None = None) -> None:
        self.config = config
        self.mode = config.mode_settings
        self.sink = sink
        self.loop = asyncio.get_running_loop()
        self.now = self.loop.time
        self.nursery = Nursery()
        self.waits = Waits(self.loop, self.nursery.boundary)
        self.accounts = Accounts()
        self.lineage = Lineage(state)
        """Prompts, claims and steps according to the journal: the same fold of its events as in a resume."""
        self.recorded = 0
        """Events so far: how a stall is noticed."""

    def record(self, event: JournalEvent) -> None:
        """Append to the journal: the only way in which the state of a run becomes known outside."""
        self.recorded += 1
        self.sink.append(event)
        self.lineage.apply(event)

    def call_soon(self, callback: Callable[[*Args], None], *args: *Args) -> None:
        """Call after this pass of the loop; an error ends the run."""
        self.loop.call_soon(self._guarded, callback, *args)

    def call_at(self, when: float, callback: Callable[[*Args], None], *args: *Args) -> asyncio.TimerHandle:
        """Call at a time; an error ends the run."""
        return self.loop.call_at(when, self._guarded, callback, *args)

    def _guarded(self, callback: Callable[[*Args], None], *args: *Args) -> None:
        with self.nursery.boundary:
            callback(*args)
