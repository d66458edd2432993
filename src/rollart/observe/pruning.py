"""Pruning: the size of a journal in SQLite stays near its limit, without loss for audits and reports.

    seq   1 ······ carried ······ folded ─────────── last Snapshot ──────── newest
          ╰ deleted ╯  ╰ fold next ╯  ╰ fold later ╯ ╰ what a resume reads: never touched ╯

A round starts when the live pages exceed three quarters of the limit and ends at half of it, or at the last snapshot:

    fold     the oldest events are folded into the audit and the report, in memory
    carry    one statement writes the folds and `upto`, the last event in them: from here on those events are void
    delete   they are deleted; their pages are reused

Readers skip events up to `upto`, so after a crash every event is either carried or read, never both.
Work is done in small slices after commits, `PACE` events for every one written: a flush never waits long, disk and loop
see no bursts, and a journal that grows faster is pruned faster.
"""

import sqlite3
from typing import NamedTuple

import msgspec

from rollart.observe.folds import FORMAT, Folds, check_format, decode_folds
from rollart.types.journal import JournalEvent

SCHEMA = """
CREATE TABLE IF NOT EXISTS events (seq INTEGER PRIMARY KEY, kind TEXT NOT NULL, body BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS snapshots ON events (kind) WHERE kind = 'Snapshot';
CREATE TABLE IF NOT EXISTS carried (one INTEGER PRIMARY KEY CHECK (one = 1), format INTEGER NOT NULL,
                                    upto INTEGER NOT NULL, body BLOB NOT NULL);
"""
PACE = 4
"""Events folded or deleted for every event written. Each is folded once and deleted once, so 2 would hold the size."""
MIN_SLICE = 1_000
"""Minimum events per slice of work: deleting costs a disk sync."""
ROW_BYTES = 24
"""Approximate overhead of a row besides its body."""

_decoder = msgspec.msgpack.Decoder(JournalEvent)


class Carried(NamedTuple):
    """State of the events up to `upto`, which the journal no longer holds."""

    upto: int
    folds: Folds


def read_carried(db: sqlite3.Connection) -> Carried:
    """State carried by the journal; empty if it was never pruned."""
    upto = carried_upto(db)
    if not upto:
        return Carried(0, Folds())
    body, found = db.execute("SELECT body, format FROM carried").fetchone()
    return Carried(upto, decode_folds(body, found))


def carried_upto(db: sqlite3.Connection) -> int:
    """Sequence number of the last event that readers must skip."""
    if db.execute("SELECT 1 FROM sqlite_master WHERE name = 'carried'").fetchone() is None:
        return 0  # written by a version that did not prune
    row = db.execute("SELECT upto, format FROM carried").fetchone()
    if row is None:
        return 0
    check_format(row[1])
    return int(row[0])


def last_snapshot(db: sqlite3.Connection) -> int:
    """Sequence number of the last snapshot; 0 if there is none."""
    row = db.execute("SELECT seq FROM events WHERE kind = 'Snapshot' ORDER BY seq DESC LIMIT 1").fetchone()
    return 0 if row is None else int(row[0])


class Pruner:
    """Prunes a journal between the commits of its writer, on the writer's connection; see the module."""

    def __init__(self, db: sqlite3.Connection, limit_bytes: int) -> None:
        self._db = db
        self._limit_bytes = limit_bytes
        self._snapshot = last_snapshot(db)
        self._carried = carried_upto(db)
        self._folds: Folds | None = None
        """State of everything up to `_folded`; None until needed."""
        self._folded = self._carried
        self._to_free = 0
        """Bytes left to free, while a round is folding."""
        self._first = self._carried + 1
        if row := db.execute("SELECT seq FROM events ORDER BY seq LIMIT 1").fetchone():
            self._first = row[0]
        """Oldest event present. An earlier writer may not have deleted everything that it carried."""
        self._owed = 0

    def committed(self, events: int, *, snapshot: bool) -> None:
        """Do work in proportion to the `events` events written, which may include a snapshot."""
        if snapshot:
            self._snapshot = last_snapshot(self._db)
        self._owed += PACE * events
        if self._owed >= MIN_SLICE:
            owed, self._owed = self._owed, 0
            self.work(owed)

    def work(self, events: int) -> None:
        """Fold or delete about `events` events, if necessary."""
        if self._first <= self._carried:
            self._delete(events)
        elif self._to_free > 0:
            self._fold(events)
        elif self._snapshot - 1 > self._carried and (live := self._live_bytes()) > self._limit_bytes * 3 // 4:
            self._to_free = live - self._limit_bytes // 2
            self._fold(events)

    def _live_bytes(self) -> int:
        (pages,), (free,), (size,) = (
            self._db.execute(f"PRAGMA {name}").fetchone() for name in ("page_count", "freelist_count", "page_size")
        )
        return int((pages - free) * size)

    def _fold(self, events: int) -> None:
        folded, folds = read_carried(self._db) if self._folds is None else (self._folded, self._folds)
        # Unset until this is done: folds that stopped at an error must not continue.
        self._folds = None
        rows = self._db.execute(
            "SELECT seq, body FROM events WHERE seq > ? AND seq < ? ORDER BY seq LIMIT ?",
            (folded, self._snapshot, events),
        ).fetchall()
        for seq, body in rows:
            folds.take(_decoder.decode(body))
            folded = seq
            self._to_free -= len(body) + ROW_BYTES
        if self._to_free <= 0 or folded == self._snapshot - 1:
            self._db.execute("INSERT OR REPLACE INTO carried VALUES (1, ?, ?, ?)", (FORMAT, folded, folds.encode()))
            self._carried, self._to_free = folded, 0
        self._folded, self._folds = folded, folds

    def _delete(self, events: int) -> None:
        first = min(self._first + events, self._carried + 1)
        self._db.execute("DELETE FROM events WHERE seq < ?", (first,))
        self._first = first
