"""Journals for the tests of this folder: of simulated runs in which much goes wrong."""

import asyncio
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from rollart.observe.journal import LIMIT_BYTES, SqliteJournal
from rollart.sim.crashes import run_world
from rollart.sim.faults import Fault
from rollart.sim.fuzz import World, make_world
from rollart.types import journal as j

SEEDS = (7, 10, 15)
LOST_UNDER_A_CLAIM = Fault(15, "kill", "trainer/", on="Trained", skip=3, incarnations=10)
LOST_IN_A_SAVE = Fault(16, "kill", "trainer/", on="Save", skip=1, incarnations=10)
AN_ENGINE_DIES = Fault(2, "kill", "engine/", on="TurnDone", skip=20)


@cache
def troubled(seed: int) -> tuple[j.JournalEvent, ...]:
    """A run whose trainer is lost twice, and whose controller dies in the middle of it and once more soon after."""
    drawn = make_world(seed)
    tables = drawn.tables | {"steps": max(8, drawn.tables["steps"]), "checkpoint_every": 2}
    faults = (LOST_UNDER_A_CLAIM, LOST_IN_A_SAVE, AN_ENGINE_DIES)
    whole = run_world(World(seed, tables, faults)).events
    half_s = next(event.at for event in whole if isinstance(event, j.StepTrained) and event.version.step == 4)
    done = run_world(World(seed, tables, faults, None, (half_s, half_s / 2)))
    assert done.violations == []
    return tuple(done.events)


def write(path: Path, events: Iterable[j.JournalEvent], limit_bytes: int = LIMIT_BYTES) -> None:
    """Append the events to the journal at `path`, as a run would."""

    async def run() -> None:
        journal = SqliteJournal(path, limit_bytes)
        for number, event in enumerate(events):
            journal.append(event)
            if number % 100 == 0:
                await journal.flush()
        await journal.close()

    asyncio.run(run())
