"""Event sinks: journals in memory and in SQLite, and a sink that reports progress."""

import asyncio
import dataclasses
import sqlite3
from collections.abc import Callable
from pathlib import Path

from rollart.app.progress import ProgressLogger
from rollart.conformance.sink import EventSinkHarness
from rollart.observe.journal import MemoryJournal, SqliteJournal, read_journal
from rollart.sim.loop import run_virtual


def memory_journal(scratch: Path) -> EventSinkHarness:  # noqa: ARG001 - it writes nothing down
    journal = MemoryJournal()
    return EventSinkHarness(build=lambda: journal, read_back=lambda: list(journal.events), run=run_virtual)


def sqlite_journal(scratch: Path) -> EventSinkHarness:
    path = scratch / "journal.sqlite"

    def fill_the_disk() -> None:
        db = sqlite3.connect(path)
        db.execute("CREATE TRIGGER full BEFORE INSERT ON events BEGIN SELECT RAISE(ABORT, 'disk full'); END")
        db.commit()
        db.close()

    return EventSinkHarness(
        build=lambda: SqliteJournal(path),
        read_back=lambda: list(read_journal(path)),
        run=asyncio.run,
        break_it=fill_the_disk,
    )


def narrated_journal(scratch: Path) -> EventSinkHarness:
    """The progress logger passes all events on."""
    harness = sqlite_journal(scratch)
    return dataclasses.replace(harness, build=lambda: ProgressLogger(harness.build(), lambda _line: None, steps=10))


SINKS: dict[str, Callable[[Path], EventSinkHarness]] = {
    "memory": memory_journal,
    "sqlite": sqlite_journal,
    "narrated": narrated_journal,
}
