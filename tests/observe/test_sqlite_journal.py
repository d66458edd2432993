"""The SQLite journal as a specification: in order, durable after a flush, and every failure is raised."""

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from rollart.observe.journal import MAX_BATCH, MemoryJournal, SqliteJournal, digest, read_journal
from rollart.types.errors import InvariantBroken, RequestError, RunError
from rollart.types.ids import PromptId
from rollart.types.journal import JournalEvent, PromptTaken, RunEnded, StallReported
from rollart.types.trajectory import Prompt


def numbered(start: int, end: int) -> list[JournalEvent]:
    return [StallReported(float(number), (f"wait {number}",)) for number in range(start, end)]


def unwritable(value: Any) -> JournalEvent:
    return PromptTaken(0.0, 7, Prompt(PromptId("7"), "maze", 7), {"value": value})


def rows(path: Path) -> list[tuple[int, str]]:
    """What another process sees now."""
    db = sqlite3.connect(path)
    try:
        return db.execute("SELECT seq, kind FROM events ORDER BY seq").fetchall()
    finally:
        db.close()


def break_table(path: Path) -> None:
    db = sqlite3.connect(path)
    db.execute("ALTER TABLE events RENAME TO gone")
    db.commit()
    db.close()


# --- order and durability -------------------------------------------------------------------------------------------


def test_events_are_read_back_in_order_by_another_before_close(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"

    async def run() -> None:
        journal = SqliteJournal(path)
        for event in numbered(0, 50):
            journal.append(event)
        await journal.flush()
        assert list(read_journal(path)) == numbered(0, 50)
        assert rows(path) == [(number + 1, "StallReported") for number in range(50)]
        for event in numbered(50, 60):
            journal.append(event)
        await journal.flush()
        assert list(read_journal(path)) == numbered(0, 60)
        await journal.close()

    asyncio.run(run())
    assert list(read_journal(path)) == numbered(0, 60)


@pytest.mark.parametrize("count", [MAX_BATCH - 1, MAX_BATCH, MAX_BATCH + 1, 2 * MAX_BATCH + 500])
def test_more_than_a_batch_between_two_flushes(tmp_path: Path, count: int) -> None:
    path = tmp_path / "journal.sqlite"
    events = numbered(0, count)

    async def run() -> None:
        journal = SqliteJournal(path)
        for event in events:
            journal.append(event)
        await journal.flush()
        assert list(read_journal(path)) == events
        await journal.close()

    asyncio.run(run())


def test_close_writes_what_is_left_and_may_be_called_again(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"

    async def run() -> None:
        journal = SqliteJournal(path)
        journal.append(RunEnded(1.0, 3))
        await journal.close()
        await journal.close()
        with pytest.raises(InvariantBroken, match="closed"):
            await journal.flush()

    asyncio.run(run())
    assert list(read_journal(path)) == [RunEnded(1.0, 3)]


def test_a_journal_is_continued_where_it_ended(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"

    async def run(events: list[JournalEvent]) -> None:
        journal = SqliteJournal(path)
        for event in events:
            journal.append(event)
        await journal.close()

    asyncio.run(run(numbered(0, 3)))
    asyncio.run(run(numbered(3, 5)))
    assert list(read_journal(path)) == numbered(0, 5)


def test_what_is_written_is_synced_to_disk(tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path / "journal.sqlite")
    assert journal._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert journal._db.execute("PRAGMA synchronous").fetchone() == (2,), "FULL"
    asyncio.run(journal.close())


# --- failures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [object(), 2**70, "\ud800", {1: 2, "a": 3}.keys()])
def test_an_event_that_cannot_be_encoded_is_raised_by_the_next_flush(tmp_path: Path, value: Any) -> None:
    path = tmp_path / "journal.sqlite"

    async def run() -> None:
        journal = SqliteJournal(path)
        journal.append(numbered(0, 1)[0])
        await journal.flush()
        journal.append(unwritable(value))
        with pytest.raises(RunError, match=r"journal\.sqlite: the journal cannot be written"):
            await asyncio.wait_for(journal.flush(), 100.0)
        await journal.flush()
        await journal.close()

    asyncio.run(run())
    assert list(read_journal(path)) == numbered(0, 1), "what was durable stays"


def test_a_failure_between_flushes_is_kept_until_somebody_hears_it(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"

    async def run() -> None:
        journal = SqliteJournal(path)
        break_table(path)
        for event in numbered(0, 5):
            journal.append(event)
            await asyncio.sleep(0.001)
        with pytest.raises(RunError, match="no such table: events"):
            await journal.flush()
        journal.append(numbered(5, 6)[0])
        with pytest.raises(RunError, match="no such table: events"):
            await journal.close()
        await journal.close()

    asyncio.run(run())


def test_after_lost_events_nothing_is_written_though_it_could_be(tmp_path: Path) -> None:
    """A disk that is full for a moment, because a checkpoint is being written, must not leave a hole."""
    path = tmp_path / "journal.sqlite"

    async def run() -> None:
        journal = SqliteJournal(path)
        journal.append(numbered(0, 1)[0])
        await journal.flush()
        with sqlite3.connect(path) as db:
            db.execute("ALTER TABLE events RENAME TO away")
        journal.append(numbered(1, 2)[0])
        with pytest.raises(RunError, match="no such table: events"):
            await journal.flush()
        with sqlite3.connect(path) as db:
            db.execute("ALTER TABLE away RENAME TO events")
        journal.append(numbered(2, 3)[0])
        with pytest.raises(RunError, match="no such table: events"):
            await journal.close()

    asyncio.run(run())
    assert list(read_journal(path)) == numbered(0, 1)


def test_a_journal_that_cannot_be_opened_is_the_requests_fault(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="the journal cannot be opened"):
        SqliteJournal(tmp_path / "no such folder" / "journal.sqlite")
    with pytest.raises(RequestError, match="choose another folder"):
        SqliteJournal(tmp_path)
    other = tmp_path / "other"
    other.write_text("something else " * 100)
    with pytest.raises(RequestError, match="the journal cannot be opened"):
        SqliteJournal(other)


# --- reading --------------------------------------------------------------------------------------------------------


def test_there_is_nothing_to_read_where_there_is_no_journal(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="there is no journal here"):
        list(read_journal(tmp_path / "journal.sqlite"))
    with pytest.raises(RequestError, match="there is no journal here"):
        list(read_journal(tmp_path))
    assert list(tmp_path.iterdir()) == [], "reading makes no file"


def test_a_file_that_is_no_journal_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("something else " * 100)
    with pytest.raises(RequestError, match="is not a journal"):
        list(read_journal(path))
    empty = tmp_path / "empty.sqlite"
    empty.write_bytes(b"")
    with pytest.raises(RequestError, match="is not a journal"):
        list(read_journal(empty))


@pytest.mark.parametrize("name", ["run #1", "run 100%41", "what?mode=memory", "läuft"])
def test_a_run_may_be_called_anything(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()

    async def run() -> None:
        journal = SqliteJournal(folder / "journal.sqlite")
        journal.append(RunEnded(1.0, 3))
        await journal.close()

    asyncio.run(run())
    assert list(read_journal(folder / "journal.sqlite")) == [RunEnded(1.0, 3)]


# --- in memory ------------------------------------------------------------------------------------------------------


def test_the_journal_in_memory_is_a_list() -> None:
    journal = MemoryJournal()
    for event in numbered(0, 3):
        journal.append(event)
    asyncio.run(journal.flush())
    asyncio.run(journal.close())
    assert journal.events == numbered(0, 3)


def test_digests_are_equal_exactly_for_equal_journals() -> None:
    assert digest(numbered(0, 3)) == digest(numbered(0, 3))
    assert len(digest([])) == 32
    different = [numbered(0, 3), numbered(0, 2), numbered(1, 3), numbered(0, 3)[::-1], []]
    assert len({digest(events) for events in different}) == len(different)
    one: JournalEvent = PromptTaken(0.0, 7, Prompt(PromptId("7"), "maze", 7), {"a": 1, "b": 2})
    other: JournalEvent = PromptTaken(0.0, 7, Prompt(PromptId("7"), "maze", 7), {"b": 2, "a": 1})
    assert digest([one]) == digest([other]), "a mapping has no order"
