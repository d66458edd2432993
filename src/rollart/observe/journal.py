"""Journals: in memory for simulations and tests, in SQLite for real runs.

Both keep events in the order of `append`, each once. SQLite is written by a thread of its own, in batches, so the
controller's loop never waits for a disk; `flush` does, and raises what went wrong since the last one. It stays near a
limit (`observe.pruning`): old events go, what an audit and a report know of them stays. A resume reads from the last
snapshot on, however long the history is.
"""

import asyncio
import hashlib
import queue
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from rollart.observe.folds import Folds
from rollart.observe.pruning import SCHEMA, Carried, Pruner, carried_upto, last_snapshot, read_carried
from rollart.types.errors import InvariantBroken, RequestError, RunError
from rollart.types.journal import JournalEvent, Snapshot

_decoder = msgspec.msgpack.Decoder(JournalEvent)
_json_decoder = msgspec.json.Decoder(JournalEvent)

MAX_BATCH = 2_000
"""Events of one commit, and so of what a flush can find ahead of it besides what was appended before it."""
LIMIT_BYTES = 1024 * 10**6
WAL_BYTES = 4 * 2**20
"""What is left of the write-ahead log when its pages have gone into the database."""


class MemoryJournal:
    """Events in a list."""

    def __init__(self) -> None:
        self.events: list[JournalEvent] = []
        self.append = self.events.append

    async def flush(self) -> None:
        pass

    async def close(self) -> None:
        pass


def digest(events: Iterable[JournalEvent]) -> str:
    """The same for two journals exactly if they are equal byte for byte."""
    encoder = msgspec.msgpack.Encoder(order="deterministic")
    hashed = hashlib.blake2b(digest_size=16)
    for event in events:
        hashed.update(encoder.encode(event))
    return hashed.hexdigest()


class _Flush:
    """A mark in the queue: everything before it is durable once it is reached."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, last: bool) -> None:
        self.loop = loop
        self.future: asyncio.Future[None] = loop.create_future()
        self.last = last

    def resolve(self, error: BaseException | None) -> None:
        def set_result() -> None:
            if not self.future.done():
                if error is None:
                    self.future.set_result(None)
                else:
                    self.future.set_exception(error)

        self.loop.call_soon_threadsafe(set_result)


class SqliteJournal:
    """One table in WAL mode; a commit per batch, synced to disk. Pruned to stay near `limit_bytes`."""

    def __init__(self, path: Path, limit_bytes: int = LIMIT_BYTES) -> None:
        self._path = path
        self._queue: queue.SimpleQueue[JournalEvent | _Flush] = queue.SimpleQueue()
        self._error: RunError | None = None
        """Not heard yet."""
        self._lost: RunError | None = None
        """Why events were lost. Nothing is written after them: a journal may end early, but it has no holes."""
        self._closed = False
        self.append = self._queue.put
        try:
            self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            self._db.executescript(
                "PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL; PRAGMA secure_delete=OFF;"
                f"PRAGMA journal_size_limit={WAL_BYTES}; {SCHEMA}"
            )
            self._pruner = Pruner(self._db, limit_bytes)
        except (sqlite3.Error, RequestError) as error:
            raise RequestError(
                f"{path}: the journal cannot be opened ({error}); make room, or choose another folder"
            ) from error
        self._thread = threading.Thread(target=self._write_all, name="journal", daemon=True)
        self._thread.start()

    async def flush(self) -> None:
        if self._closed:
            raise InvariantBroken(f"{self._path}: the journal is closed, so nobody would answer a flush")
        await self._mark(last=False)

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            await self._mark(last=True)

    async def _mark(self, *, last: bool) -> None:
        mark = _Flush(asyncio.get_running_loop(), last=last)
        self._queue.put(mark)
        await mark.future

    def _write_all(self) -> None:
        while True:
            batch: list[JournalEvent] = []
            item: JournalEvent | _Flush = self._queue.get()
            while not isinstance(item, _Flush):
                batch.append(item)
                if len(batch) == MAX_BATCH:
                    break
                try:
                    item = self._queue.get_nowait()
                except queue.Empty:
                    break
            self._commit(batch)
            if isinstance(item, _Flush):
                error, self._error = self._error, None
                if item.last:
                    with suppress(sqlite3.Error):  # what was committed is safe
                        self._db.close()
                item.resolve(error)
                if item.last:
                    return
            self._prune(batch)

    def _commit(self, batch: list[JournalEvent]) -> None:
        if not batch:
            return
        if self._lost is not None:
            self._error = self._lost
            return
        try:
            self._db.execute("BEGIN")
            self._db.executemany(
                "INSERT INTO events (kind, body) VALUES (?, ?)",
                [(type(event).__name__, msgspec.msgpack.encode(event)) for event in batch],
            )
            self._db.execute("COMMIT")
        except Exception as error:  # noqa: BLE001 - whatever it is: without this thread every flush would hang
            if self._db.in_transaction:
                with suppress(sqlite3.Error):  # the disk may not even let it undo; the next opening does
                    self._db.execute("ROLLBACK")
            # Kept until somebody can hear it: the next flush raises it, and the run stops there.
            self._lost = RunError(f"{self._path}: the journal cannot be written ({error}); free the disk and resume")
            self._error = self._lost

    def _prune(self, batch: list[JournalEvent]) -> None:
        try:
            self._pruner.committed(len(batch), snapshot=any(isinstance(event, Snapshot) for event in batch))
        except Exception as error:  # noqa: BLE001 - as above
            self._error = self._error or RunError(
                f"{self._path}: the journal cannot be pruned ({error}); free the disk, or raise journal_mb, and resume"
            )


def read_journal(path: Path) -> Iterator[JournalEvent]:
    """The events that a journal holds, in order: of SQLite, what is not pruned; of a trace of JSON lines, all."""
    if not path.is_file():
        raise RequestError(f"{path}: there is no journal here; give the folder of a run")
    if path.suffix == ".jsonl":
        yield from _read_trace(path)
        return
    with _reading(path) as db:
        yield from _read_after(db, carried_upto(db))


def read_since_snapshot(path: Path) -> Iterator[JournalEvent]:
    """The last snapshot of a run and what came after it: what a resume needs, found without reading the rest."""
    if not path.is_file():
        raise RequestError(f"{path}: there is no journal here; give the folder of a run")
    with _reading(path) as db:
        if db.execute("SELECT 1 FROM sqlite_master WHERE name = 'events'").fetchone() is None:
            return  # its writer was killed before it had made the table
        yield from _read_after(db, max(last_snapshot(db) - 1, carried_upto(db)))


def fold_journal(path: Path, beside: Callable[[JournalEvent], None] | None = None) -> tuple[int, Folds]:
    """The audit and the report of a whole run, the pruned part included; and how many events that part had.

    `beside` is shown every event that is still there, so that the journal need not be read twice.
    """

    def take_all(events: Iterable[JournalEvent]) -> None:
        for event in events:
            folds.take(event)
            if beside is not None:
                beside(event)

    if path.suffix == ".jsonl" or not path.is_file():
        pruned, folds = Carried(0, Folds())
        take_all(read_journal(path))
    else:
        with _reading(path) as db:
            pruned, folds = read_carried(db)
            take_all(_read_after(db, pruned))
    if not folds.auditor.count:
        raise RequestError(f"{path} is not a journal: there is no event in it; give the folder or a trace of a run")
    return pruned, folds


def _read_trace(path: Path) -> Iterator[JournalEvent]:
    try:
        with path.open("rb") as lines:
            yield from (_json_decoder.decode(line) for line in lines)
    except msgspec.MsgspecError as error:
        raise RequestError(f"{path} is not a journal, or is damaged ({error}); give a trace of a run") from error


@contextmanager
def _reading(path: Path) -> Iterator[sqlite3.Connection]:
    """One state of the journal, whatever its writer does meanwhile."""
    db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)
    try:
        db.execute("BEGIN")
        yield db
    except (sqlite3.DatabaseError, msgspec.MsgspecError) as error:
        raise RequestError(f"{path} is not a journal, or is damaged ({error}); give the folder of a run") from error
    except RequestError as error:
        raise RequestError(f"{path}: {error}") from error
    finally:
        db.close()


def _read_after(db: sqlite3.Connection, last: int) -> Iterator[JournalEvent]:
    for seq, body in db.execute("SELECT seq, body FROM events WHERE seq > ? ORDER BY seq", (last,)):
        if seq != last + 1:
            raise RequestError(f"it is damaged: events {last + 1} to {seq - 1} are missing; restore it from a copy")
        last = seq
        yield _decoder.decode(body)
