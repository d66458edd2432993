"""What every part of the control plane shares: config, clock, journal, waits, nursery and the accounts of time."""

import asyncio

from rollart.config.schema import RunConfig
from rollart.control.accounts import Accounts
from rollart.control.nursery import Nursery
from rollart.control.waits import Waits
from rollart.ports.sink import EventSink
from rollart.types.journal import JournalEvent


class Context:
    """Made once per run, inside its loop."""

    def __init__(self, config: RunConfig, sink: EventSink) -> None:
        self.config = config
        self.mode = config.mode_settings
        self.sink = sink
        self.loop = asyncio.get_running_loop()
        self.now = self.loop.time
        self.waits = Waits(self.loop)
        self.nursery = Nursery()
        self.accounts = Accounts(self.now())
        self.recorded = 0
        """Events so far: how a stall is noticed."""

    def record(self, event: JournalEvent) -> None:
        """Append to the journal: the only way in which the state of a run becomes known outside."""
        self.recorded += 1
        self.sink.append(event)
