"""Formats of the journal: reading older ones and refusing newer ones.

    0   before formats had numbers: SQLite without a `user_version`, traces without a header line
    1   `RunEnded.stop` and `TrajectoryEnded.failure`
    2   groups of other sizes: `GroupRules`, `MembersLost`, `RedundancyChanged`, `GroupOpened.alpha`, `Ticket.losses`
    3   `MemberReplaced`; nodes: `WorkerWaits`, `WorkerPlaced`, `WorkerLeaves`, `WorkerLeft`
    4   `AffinityChanged`, `RunStarted.affinity`; several rewards: `RunStarted.rewards`, `RewardGiven`, `RewardFailed`
    5   `RewardsUsed`; elastic pools: `RunStarted.elasticity`, `RoomChanged`, `EnginesChanged`, `EnginesForgiven`;
        several attempts at a held-out prompt: `EvalEnded.samples`, `EvalEnded.pass_at`

A journal in SQLite has its format in `PRAGMA user_version`, a trace of JSON lines in its first line, `{"format":5}`.
Events of an older format are migrated when read, so readers only see events of the current format. A resume appends to
the journal, so the journal is first migrated in place (`migrate`).

When journal events change: raise `FORMAT`, and append to `MIGRATIONS` one pure function per kind of event that changed.
A new field whose default is right for old events needs no function, only the number.
"""

import sqlite3
from collections.abc import Callable
from typing import Any

import msgspec

from rollart.types.errors import RequestError
from rollart.types.journal import JournalEvent

RawEvent = dict[str, Any]
"""An event decoded without its type: `type` is the name of its class."""
Migration = dict[str, Callable[[RawEvent], RawEvent]]
"""Per kind of event, its conversion to the next format."""

FORMAT = 5

_decoder: msgspec.msgpack.Decoder[JournalEvent] = msgspec.msgpack.Decoder(JournalEvent)
_json_decoder: msgspec.json.Decoder[JournalEvent] = msgspec.json.Decoder(JournalEvent)
_raw_decoder: msgspec.msgpack.Decoder[RawEvent] = msgspec.msgpack.Decoder(RawEvent)
_raw_json_decoder: msgspec.json.Decoder[RawEvent] = msgspec.json.Decoder(RawEvent)


def check_format(found: int) -> None:
    """Refuse a format that this version of rollart cannot read."""
    if not 0 <= found <= FORMAT:
        raise RequestError(
            f"the journal is in format {found}, this version of rollart reads formats up to {FORMAT}; "
            "use the version that wrote it, or start a new run in another folder"
        )


def format_of(db: sqlite3.Connection) -> int:
    """Format of a journal in SQLite; unknown ones are refused."""
    found = int(db.execute("PRAGMA user_version").fetchone()[0])
    check_format(found)
    return found


class EventReader:
    """Decoder for events of a journal in format `found`."""

    def __init__(self, found: int) -> None:
        check_format(found)
        self._steps = MIGRATIONS[found:]
        self.kinds = sorted({kind for step in self._steps for kind in step})
        """Kinds of events that differ from the current format."""

    def from_row(self, kind: str, body: bytes) -> JournalEvent:
        """Decode an event of a journal in SQLite."""
        if kind in self.kinds:
            body = msgspec.msgpack.encode(self.migrated(_raw_decoder.decode(body)))
        return _decoder.decode(body)

    def from_line(self, line: bytes) -> JournalEvent:
        """Decode an event of a trace."""
        if self.kinds:
            line = msgspec.json.encode(self.migrated(_raw_json_decoder.decode(line)))
        return _json_decoder.decode(line)

    def migrated(self, raw: RawEvent) -> RawEvent:
        """The event in the current format."""
        for step in self._steps:
            change = step.get(raw.get("type", ""))
            if change is not None:
                raw = change(raw)
        return raw


def migrate(db: sqlite3.Connection) -> None:
    """Migrate a journal to the current format, atomically."""
    found = format_of(db)
    if found == FORMAT:
        return
    reader = EventReader(found)
    db.execute("BEGIN IMMEDIATE")
    with db:  # commits, or rolls back
        marks = ", ".join("?" * len(reader.kinds))
        rows = db.execute(f"SELECT seq, kind, body FROM events WHERE kind IN ({marks})", reader.kinds).fetchall()
        events = ((seq, reader.from_row(kind, body)) for seq, kind, body in rows)
        db.executemany(
            "UPDATE events SET kind = ?, body = ? WHERE seq = ?",
            ((type(event).__name__, msgspec.msgpack.encode(event), seq) for seq, event in events),
        )
        db.execute(f"PRAGMA user_version = {FORMAT}")


class _Header(msgspec.Struct):
    format: int


def header_line() -> bytes:
    """First line of a trace."""
    return msgspec.json.encode(_Header(FORMAT)) + b"\n"


def format_in(line: bytes) -> int | None:
    """Format in a header line; None if the line is an event, as in traces of format 0."""
    head = _raw_json_decoder.decode(line)
    return None if "type" in head else msgspec.convert(head, _Header).format


# --- from 0 to 1 ----------------------------------------------------------------------------------------------------

_STOPS_0 = {
    "interrupted": "interrupted",
    "WorkerLost": "worker_lost",
    "NoEngine": "no_engine",
    "ShareUnfilled": "share_unfilled",
    "TaskBroken": "task_broken",
    "TrainingFailed": "training_failed",
    "TrainerLost": "training_failed",
    "StalledRun": "stalled",
    "InvariantBroken": "invariant_broken",
    "NegativeStaleness": "invariant_broken",
}
"""Prefixes of `RunEnded.reason` in format 0: the name of the error."""
_FAILURES_0 = {
    "took longer than": "deadline",
    "no answer within": "deadline",
    " was lost: ": "worker_lost",
    " is gone": "worker_lost",
    "not a finite number": "invalid",
}
"""Substrings of the `cause` of a failed trajectory in format 0."""


def stop_of_reason(reason: str) -> str:
    """`RunEnded.stop` for a reason of format 0."""
    return _STOPS_0.get(reason.partition(":")[0], "failed") if reason else "done"


def _run_ended_0(raw: RawEvent) -> RawEvent:
    return {**raw, "stop": stop_of_reason(raw.get("reason", ""))}


def _trajectory_ended_0(raw: RawEvent) -> RawEvent:
    if raw.get("outcome") not in ("env_failed", "engine_failed", "reward_failed"):
        return raw
    cause = raw.get("cause", "")
    return {**raw, "failure": next((kind for words, kind in _FAILURES_0.items() if words in cause), "error")}


MIGRATIONS: tuple[Migration, ...] = (
    {"RunEnded": _run_ended_0, "TrajectoryEnded": _trajectory_ended_0},
    {},  # without `GroupRules` groups are whole, and the other fields have their defaults
    {},
    {},
    {},
)
"""`MIGRATIONS[n]` converts format n to n + 1."""
assert len(MIGRATIONS) == FORMAT
