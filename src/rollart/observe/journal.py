"""Journals: in memory for simulations and tests, in SQLite for real runs.

Both keep events in the order of `append`, each once. SQLite is written in batches by its own thread, so the
controller's loop never waits for a disk; `flush` does, and raises errors since the last one. Its size stays near a
limit (`observe.pruning`): old events are deleted, and their contribution to audit and report is kept. A resume reads
from the last snapshot on, however long the history is. Journals of older versions of rollart are read and resumed like
current ones; newer ones are refused (`observe.formats`).
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
from rollart.observe.formats import FORMAT, EventReader, format_in, format_of, header_line, migrate
from rollart.observe.pruning import SCHEMA, Carried, Pruner, carried_upto, last_snapshot, read_carried
from rollart.types.errors import InvariantBroken, RequestError, RunError
from rollart.types.journal import JournalEvent, Snapshot

MAX_BATCH = 2_000
"""Maximum events per commit, and so the most that a flush may have to wait for besides earlier appends."""
LIMIT_BYTES = 1024 * 10**6
WAL_BYTES = 4 * 2**20
"""Size to which the write-ahead log is truncated after a checkpoint."""


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
    """Digest that is equal for two journals exactly if they are equal byte for byte."""
    encoder = msgspec.msgpack.Encoder(order="deterministic")
    hashed = hashlib.blake2b(digest_size=16)
    for event in events:
        hashed.update(encoder.encode(event))
    return hashed.hexdigest()


class _Flush:
    """Marker in the queue: everything before it is durable once it is reached."""

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
        """Error not raised yet."""
        self._lost: RunError | None = None
        """Why events were lost. Nothing is written after them: a journal may end early, but has no gaps."""
        self._closed = False
        self.append = self._queue.put
        try:
            self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            self._db.executescript(
                "PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL; PRAGMA secure_delete=OFF;"
                f"PRAGMA journal_size_limit={WAL_BYTES};"
            )
            _create_or_migrate(self._db)
            self._pruner = Pruner(self._db, limit_bytes)
        except sqlite3.Error as error:
            raise RequestError(
                f"{path}: the journal cannot be opened ({error}); free space, or choose another folder"
            ) from error
        except msgspec.MsgspecError as error:
            raise RequestError(f"{path} is not a journal, or is damaged ({error}); restore it from a copy") from error
        except RequestError as error:
            raise RequestError(f"{path}: {error}") from error
        self._thread = threading.Thread(target=self._write_all, name="journal", daemon=True)
        self._thread.start()

    async def flush(self) -> None:
        if self._closed:
            raise InvariantBroken(f"{self._path}: the journal is closed and cannot be flushed")
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
                    with suppress(sqlite3.Error):  # committed events are safe
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
        except Exception as error:  # noqa: BLE001 - any error: without this thread every flush would hang
            if self._db.in_transaction:
                with suppress(sqlite3.Error):  # the disk may not even allow a rollback; the next opening does it
                    self._db.execute("ROLLBACK")
            # Kept until it can be raised: the next flush does, and the run stops there.
            self._lost = RunError(f"{self._path}: the journal cannot be written ({error}); free the disk and resume")
            self._error = self._lost

    def _prune(self, batch: list[JournalEvent]) -> None:
        try:
            self._pruner.committed(len(batch), snapshot=any(isinstance(event, Snapshot) for event in batch))
        except Exception as error:  # noqa: BLE001 - as above
            self._error = self._error or RunError(
                f"{self._path}: the journal cannot be pruned ({error}); free the disk, or raise journal_mb, and resume"
            )


def _create_or_migrate(db: sqlite3.Connection) -> None:
    """Create tables and format of a new journal in one transaction, or migrate an old one to the current format."""
    if _is_empty(db):
        db.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version = {FORMAT}; COMMIT;")
    else:
        format_of(db)
        db.executescript(SCHEMA)
        migrate(db)


def _is_empty(db: sqlite3.Connection) -> bool:
    """Whether there are no tables: the writer was killed before it had created them."""
    return db.execute("SELECT 1 FROM sqlite_master WHERE name = 'events'").fetchone() is None


def write_trace(path: Path, events: Iterable[JournalEvent]) -> None:
    """Write a journal as JSON lines: the format, then one event per line."""
    path.write_bytes(header_line() + b"".join(msgspec.json.encode(event) + b"\n" for event in events))


def read_journal(path: Path) -> Iterator[JournalEvent]:
    """Events of a journal, in order: from SQLite, those not pruned; from a trace of JSON lines, all."""
    if not path.is_file():
        raise RequestError(f"{path}: there is no journal here; give the folder of a run")
    if path.suffix == ".jsonl":
        yield from _read_trace(path)
        return
    with _reading(path) as db:
        yield from _read_after(db, carried_upto(db))


def read_since_snapshot(path: Path) -> Iterator[JournalEvent]:
    """The last snapshot of a run and the events after it, found without reading the rest; used by a resume."""
    if not path.is_file():
        raise RequestError(f"{path}: there is no journal here; give the folder of a run")
    with _reading(path) as db:
        if _is_empty(db):
            return
        yield from _read_after(db, max(last_snapshot(db) - 1, carried_upto(db)))


def fold_journal(path: Path, beside: Callable[[JournalEvent], None] | None = None) -> tuple[int, Folds]:
    """Audit and report of a whole run, including the pruned part, and the number of pruned events.

    `beside` is called with every event that is still present, so that the journal need not be read twice.
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
        raise RequestError(f"{path} is not a journal: it has no events; give the folder or a trace of a run")
    return pruned, folds


def _read_trace(path: Path) -> Iterator[JournalEvent]:
    try:
        with path.open("rb") as lines:
            first = next(lines, None)
            if first is None:
                return
            found = format_in(first)
            reader = EventReader(found or 0)
            if found is None:
                yield reader.from_line(first)
            yield from map(reader.from_line, lines)
    except RequestError as error:
        raise RequestError(f"{path}: {error}") from error
    except msgspec.MsgspecError as error:
        raise RequestError(f"{path} is not a journal, or is damaged ({error}); give a trace of a run") from error


@contextmanager
def _reading(path: Path) -> Iterator[sqlite3.Connection]:
    """A consistent view of the journal, whatever its writer does meanwhile."""
    db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)
    try:
        db.execute("BEGIN")
        format_of(db)
        yield db
    except (sqlite3.DatabaseError, msgspec.MsgspecError) as error:
        raise RequestError(f"{path} is not a journal, or is damaged ({error}); give the folder of a run") from error
    except RequestError as error:
        raise RequestError(f"{path}: {error}") from error
    finally:
        db.close()


def _read_after(db: sqlite3.Connection, last: int) -> Iterator[JournalEvent]:
    decode = EventReader(format_of(db)).from_row
    for seq, kind, body in db.execute("SELECT seq, kind, body FROM events WHERE seq > ? ORDER BY seq", (last,)):
        if seq != last + 1:
            raise RequestError(f"it is damaged: events {last + 1} to {seq - 1} are missing; restore it from a copy")
        last = seq
        yield decode(kind, body)
