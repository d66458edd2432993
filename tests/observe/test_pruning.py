"""A pruned journal has the same contents as the whole one for its readers, and stays within its size limit."""

import asyncio
import random
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from journals import SEEDS, troubled, write
from msgspec.structs import replace

from rollart.observe.audit import audit
from rollart.observe.folds import FORMAT
from rollart.observe.journal import (
    WAL_BYTES,
    SqliteJournal,
    fold_journal,
    read_journal,
    read_since_snapshot,
)
from rollart.observe.pruning import SCHEMA, Pruner, carried_upto, last_snapshot
from rollart.observe.report import make_report
from rollart.policy.lineage import replay
from rollart.types import journal as j
from rollart.types.errors import RequestError, RunError
from rollart.types.snapshot import RunState

Journal = list[j.JournalEvent]
SMALL = 64 * 1024


def check_same(path: Path, events: Journal) -> int:
    """The journal on disk against the events of the run: audit, report and resume. Returns how many are pruned."""
    pruned, folds = fold_journal(path)
    assert folds.auditor.count == len(events)
    assert folds.finish() == (audit(events), make_report(events))
    assert list(read_journal(path)) == events[pruned:]
    assert replay(read_since_snapshot(path)) == replay(events)
    return pruned


# --- the same as the whole ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_a_pruned_journal_says_what_the_whole_one_says(tmp_path: Path, seed: int) -> None:
    events = list(troubled(seed))
    write(tmp_path / "whole.sqlite", events)
    write(tmp_path / "pruned.sqlite", events, SMALL)
    assert check_same(tmp_path / "whole.sqlite", events) == 0
    assert check_same(tmp_path / "pruned.sqlite", events) > len(events) // 4


@pytest.mark.parametrize("seed", SEEDS)
def test_pruning_goes_on_in_the_next_controller(tmp_path: Path, seed: int) -> None:
    events, path = list(troubled(seed)), tmp_path / "journal.sqlite"
    starts = [number for number, event in enumerate(events) if isinstance(event, j.RunResumed)]
    for start, end in zip([0, *starts], [*starts, len(events)], strict=True):
        write(path, events[start:end], SMALL)
        check_same(path, events[:end])
    assert check_same(path, events) > 0


@pytest.mark.parametrize("seed", SEEDS)
def test_a_crash_between_any_two_pieces_of_work_leaves_a_whole_journal(tmp_path: Path, seed: int) -> None:
    """Whatever is on disk between two statements of the writer is what a crash leaves, or what another process reads.

    A controller then goes on with a copy of it, and nothing is lost or counted twice."""
    events, dice = list(troubled(seed)), random.Random(seed)
    path, copy = tmp_path / "journal.sqlite", tmp_path / "copy.sqlite"
    db = connect(path)
    pruner = Pruner(db, SMALL)
    written = 0
    seen: set[tuple[int, bool]] = set()
    while written < len(events):
        count = dice.randint(1, len(events) // 20)
        insert(db, events[written : written + count])
        written = min(written + count, len(events))
        pruner.committed(0, snapshot=True)
        if dice.random() < 0.2:
            pruner = Pruner(db, dice.randint(0, 2 * SMALL))
        for _ in range(dice.randint(0, 4)):
            pruner.work(dice.randint(1, len(events) // 5))
            assert carried_upto(db) < max(last_snapshot(db), 1)
            for suffix in ("", "-wal"):
                shutil.copy(f"{path}{suffix}", f"{copy}{suffix}")
            pruned = check_same(copy, events[:written])
            (first,) = db.execute("SELECT min(seq) FROM events").fetchone()
            seen.add((pruned, first <= pruned))
            if dice.random() < 0.2:
                write(copy, events[written : written + 300], 0)
                check_same(copy, events[: written + 300])
            copy.unlink()
    db.close()
    assert len({pruned for pruned, _ in seen}) >= 3
    assert {partly for _, partly in seen} == {True, False}, "in the middle of deleting, and not"


def test_what_was_wrong_in_the_pruned_part_is_still_reported(tmp_path: Path) -> None:
    sound = list(troubled(SEEDS[2]))
    dice = random.Random(1)
    turns = [number for number, event in enumerate(sound) if isinstance(event, j.TurnEnded)]
    for number in dice.sample(turns[: len(turns) // 5], 3):
        turn = sound[number]
        assert isinstance(turn, j.TurnEnded)
        for events in (
            [*sound[:number], replace(turn, sampled=turn.sampled + 1), *sound[number + 1 :]],
            [*sound[:number], turn, *sound[number:]],
            [*sound[:number], *sound[number + 1 :]],
        ):
            path = tmp_path / f"{number}-{len(events)}-{events[number] == turn}.sqlite"
            write(path, events, SMALL)
            pruned, folds = fold_journal(path)
            violations, report = folds.finish()
            assert violations == audit(events) != []
            assert violations[0].event < pruned
            assert report == make_report(events)


# --- size -----------------------------------------------------------------------------------------------------------


def long_journal(count: int) -> Iterator[j.JournalEvent]:
    """A kilobyte an event, and a snapshot every 200."""
    yield j.RunStarted(0.0, "long", "rollart", 0, 0, {}, 1)
    for number in range(count):
        yield j.StallReported(float(number), (f"{number:1000}",))
        if number % 200 == 199:
            yield j.Snapshot(float(number), RunState())


def test_a_journal_stays_near_its_limit(tmp_path: Path) -> None:
    path, limit, count = tmp_path / "journal.sqlite", 4_000_000, 30_000
    sizes: list[int] = []

    async def run() -> None:
        journal = SqliteJournal(path, limit)
        for number, event in enumerate(long_journal(count)):
            journal.append(event)
            if number % 200 == 0:
                await journal.flush()
                sizes.append(files_bytes(path))
        await journal.close()

    asyncio.run(run())
    assert max(sizes) < limit + 2 * WAL_BYTES, f"{max(sizes):,} bytes"
    assert path.stat().st_size < 1.1 * limit
    pruned, folds = fold_journal(path)
    assert pruned > 0.8 * count
    violations, report = folds.finish()
    assert violations == []
    assert report is not None
    assert report.stalls == count


def test_nothing_is_pruned_without_need_or_without_a_snapshot(tmp_path: Path) -> None:
    events = list(long_journal(3000))
    write(tmp_path / "roomy.sqlite", events, 10_000_000)
    assert list(read_journal(tmp_path / "roomy.sqlite")) == events
    bare = [event for event in events if not isinstance(event, j.Snapshot)]
    write(tmp_path / "bare.sqlite", bare, 100_000)
    assert list(read_journal(tmp_path / "bare.sqlite")) == bare


def test_the_last_snapshot_is_kept_however_small_the_limit(tmp_path: Path) -> None:
    events = list(long_journal(3100))
    write(tmp_path / "journal.sqlite", events, 0)
    kept = list(read_journal(tmp_path / "journal.sqlite"))
    since = max(number for number, event in enumerate(events) if isinstance(event, j.Snapshot))
    assert len(kept) < 1000
    assert kept[-(len(events) - since) :] == events[since:]
    assert list(read_since_snapshot(tmp_path / "journal.sqlite")) == events[since:]


def test_deleting_that_was_cut_short_is_finished_by_the_next_writer(tmp_path: Path) -> None:
    path, events = tmp_path / "journal.sqlite", list(long_journal(2000))
    db = connect(path)
    insert(db, events)
    pruner = Pruner(db, 0)
    pruner.work(1)
    while not carried_upto(db):
        pruner.work(500)
    db.close()
    upto = last_snapshot(connect(path)) - 1
    assert count(path, "seq <= ?", upto) == upto, "carried, and still there"
    assert list(read_journal(path)) == events[upto:]
    write(path, [j.StallReported(3000.0, ("more",))] * 2000)
    assert count(path, "seq <= ?", upto) == 0


# --- resume ---------------------------------------------------------------------------------------------------------


def test_a_resume_costs_what_came_after_the_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = 0
    decoder = msgspec.msgpack.Decoder(j.JournalEvent)

    class Counting:
        def decode(self, body: bytes) -> j.JournalEvent:
            nonlocal decoded
            decoded += 1
            return decoder.decode(body)

    monkeypatch.setattr("rollart.observe.formats._decoder", Counting())
    for length in (1_000, 20_000):
        path = tmp_path / f"{length}.sqlite"
        write(path, long_journal(length + 50))
        decoded = 0
        assert replay(read_since_snapshot(path)) == RunState()
        assert decoded == 51, f"after {length} events"


def test_the_last_snapshot_is_found_by_an_index(tmp_path: Path) -> None:
    db = connect(tmp_path / "journal.sqlite")
    plans: list[str] = []
    db.set_trace_callback(plans.append)
    last_snapshot(db)
    db.set_trace_callback(None)
    (_, _, _, plan) = db.execute(f"EXPLAIN QUERY PLAN {plans[0]}").fetchone()
    assert "INDEX snapshots" in plan
    db.close()


def test_a_run_without_a_snapshot_is_read_whole(tmp_path: Path) -> None:
    events = list(troubled(SEEDS[0]))
    first = next(number for number, event in enumerate(events) if isinstance(event, j.Snapshot))
    write(tmp_path / "journal.sqlite", events[:first])
    assert list(read_since_snapshot(tmp_path / "journal.sqlite")) == events[:first]
    with pytest.raises(RequestError, match="no journal here"):
        list(read_since_snapshot(tmp_path / "nothing.sqlite"))


# --- damage ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def pruned(tmp_path: Path) -> Path:
    path = tmp_path / "journal.sqlite"
    write(path, long_journal(3000), 100_000)
    assert fold_journal(path)[0] > 0
    return path


def execute(path: Path, statement: str, *values: object) -> None:
    db = sqlite3.connect(path)
    db.execute(statement, values)
    db.commit()
    db.close()


def test_another_format_is_refused_by_everybody(pruned: Path) -> None:
    execute(pruned, "UPDATE carried SET format = ?", FORMAT + 1)
    for read in (fold_journal, lambda path: list(read_journal(path)), lambda path: list(read_since_snapshot(path))):
        with pytest.raises(
            RequestError, match=rf"journal\.sqlite: .* in format {FORMAT + 1}.*use the version that wrote it"
        ):
            read(pruned)
    with pytest.raises(RequestError, match=rf"journal\.sqlite: .* in format {FORMAT + 1}"):
        SqliteJournal(pruned)


def test_a_damaged_journal_is_refused(pruned: Path, tmp_path: Path) -> None:
    first = fold_journal(pruned)[0] + 1
    execute(pruned, "DELETE FROM events WHERE seq < ?", first)
    whole = pruned.read_bytes()
    for statement, message in (
        ("UPDATE carried SET body = x'c1'", "is not a journal, or is damaged"),
        (f"DELETE FROM events WHERE seq = {first}", f"damaged: events {first} to {first} are missing"),
        (f"DELETE FROM events WHERE seq IN ({first + 3}, {first + 4})", f"events {first + 3} to {first + 4} are"),
        (f"UPDATE events SET body = x'80' WHERE seq = {first + 1}", "is not a journal, or is damaged"),
        ("DELETE FROM carried", f"events 1 to {first - 1} are missing"),
    ):
        copy = tmp_path / "copy.sqlite"
        copy.write_bytes(whole)
        execute(copy, statement)
        with pytest.raises(RequestError, match=message):
            fold_journal(copy)
        copy.unlink()


def test_a_journal_that_cannot_be_pruned_stops_the_run(pruned: Path) -> None:
    execute(pruned, "UPDATE carried SET body = x'c1'")

    async def run() -> None:
        journal = SqliteJournal(pruned, 100_000)
        with pytest.raises(RunError, match="cannot be pruned"):
            await flush_often(journal, long_journal(3000))
        await journal.close()

    asyncio.run(run())


@pytest.mark.parametrize("name", ["empty.jsonl", "empty.sqlite"])
def test_a_journal_without_an_event_is_refused(tmp_path: Path, name: str) -> None:
    if name == "empty.jsonl":
        (tmp_path / name).write_bytes(b"")
    else:
        write(tmp_path / name, [])
    with pytest.raises(RequestError, match="not a journal: it has no events"):
        fold_journal(tmp_path / name)


def test_a_journal_of_a_version_that_did_not_prune_is_read(tmp_path: Path) -> None:
    path, events = tmp_path / "journal.sqlite", list(long_journal(300))
    write(path, events)
    execute(path, "DROP TABLE carried")
    execute(path, "DROP INDEX snapshots")
    check_same(path, events)
    write(path, [j.StallReported(300.0, ("more",))])
    check_same(path, [*events, j.StallReported(300.0, ("more",))])


def test_reading_goes_on_while_the_journal_is_pruned(tmp_path: Path) -> None:
    """A reader sees the journal of one moment."""
    path, events = tmp_path / "journal.sqlite", list(long_journal(2000))
    write(path, events)
    reader = read_journal(path)
    assert next(reader) == events[0]
    writer = threading.Thread(target=write, args=(path, [j.StallReported(3000.0, ("more",))] * 3000, 0))
    writer.start()
    writer.join()
    assert fold_journal(path)[0] > 1500
    assert list(reader) == events[1:]


# --- parts ----------------------------------------------------------------------------------------------------------


def connect(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None)
    db.executescript(f"PRAGMA journal_mode=WAL; PRAGMA synchronous=OFF; {SCHEMA}")
    return db


def insert(db: sqlite3.Connection, events: Journal) -> None:
    rows = [(type(event).__name__, msgspec.msgpack.encode(event)) for event in events]
    db.executemany("INSERT INTO events (kind, body) VALUES (?, ?)", rows)


async def flush_often(journal: SqliteJournal, events: Iterator[j.JournalEvent]) -> None:
    for number, event in enumerate(events):
        journal.append(event)
        if number % 100 == 0:
            await journal.flush()


def files_bytes(path: Path) -> int:
    """Size of the database and its write-ahead log."""
    return sum(file.stat().st_size for file in path.parent.glob(f"{path.name}*"))


def count(path: Path, condition: str, *values: object) -> int:
    db = sqlite3.connect(path)
    try:
        return int(db.execute(f"SELECT count(*) FROM events WHERE {condition}", values).fetchone()[0])
    finally:
        db.close()
