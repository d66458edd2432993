"""Journals of older versions of rollart are read, reported and resumed; those of newer ones are refused.

`old_journals/format_0.jsonl` is the journal of a simulated run whose controller was killed after its first checkpoint,
and `carried_2.msgpack` what pruning its first 105 events carries, both written before journals had a format number.
"""

import sqlite3
from pathlib import Path

import msgspec
import pytest
from journals import write

from rollart.control.pipeline import run_pipeline
from rollart.observe import folds
from rollart.observe.formats import FORMAT, EventReader
from rollart.observe.journal import (
    MemoryJournal,
    SqliteJournal,
    fold_journal,
    read_journal,
    read_since_snapshot,
    write_trace,
)
from rollart.observe.report import Report
from rollart.policy.lineage import replay
from rollart.sim.checkpoints import SimCheckpoints
from rollart.sim.loop import run_virtual
from rollart.sim.run import parts
from rollart.sim.scenario import load_scenario
from rollart.types import journal as j
from rollart.types.errors import RequestError
from rollart.types.failures import FailureKind, StopReason
from rollart.types.versions import Version

OLD = Path(__file__).parent / "old_journals"
TRACE = OLD / "format_0.jsonl"
CARRIED = 105
SMALL = [
    *("batch.trajectories=4", "batch.group_size=2", "steps=4", "checkpoint_every=1"),
    *("tasks.frozenlake.environments=2", "tasks.math.environments=2"),
    *("tasks.frozenlake.max_turns=2", "tasks.math.max_turns=1"),
]
"""The run of the trace."""
TABLES = "CREATE TABLE events (seq INTEGER PRIMARY KEY, kind TEXT NOT NULL, body BLOB NOT NULL);"
CARRIED_TABLE = (
    "CREATE TABLE carried (one INTEGER PRIMARY KEY CHECK (one = 1), format INTEGER NOT NULL, "
    "upto INTEGER NOT NULL, body BLOB NOT NULL);"
)


def rows(path: Path) -> list[tuple[str, dict[str, object]]]:
    db = sqlite3.connect(path)
    found = db.execute("SELECT kind, body FROM events ORDER BY seq").fetchall()
    db.close()
    return [(kind, msgspec.msgpack.decode(body)) for kind, body in found]


def number_of(path: Path) -> int:
    db = sqlite3.connect(path)
    (found,) = db.execute("PRAGMA user_version").fetchone()
    db.close()
    return int(found)


def set_number(path: Path, number: int) -> None:
    db = sqlite3.connect(path)
    db.execute(f"PRAGMA user_version = {number}")
    db.close()


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """The trace as a journal in SQLite, as the old version wrote it."""
    path = tmp_path / "journal.sqlite"
    db = sqlite3.connect(path)
    db.executescript(TABLES)
    raw = [msgspec.json.decode(line) for line in TRACE.read_bytes().splitlines()]
    db.executemany(
        "INSERT INTO events (kind, body) VALUES (?, ?)",
        [(event["type"], msgspec.msgpack.encode(event)) for event in raw],
    )
    db.commit()
    db.close()
    return path


@pytest.fixture
def old_pruned(old: Path) -> Path:
    db = sqlite3.connect(old)
    db.executescript(CARRIED_TABLE)
    body = (OLD / "carried_2.msgpack").read_bytes()
    db.execute("INSERT INTO carried VALUES (1, 2, ?, ?)", (CARRIED, body))
    db.execute("DELETE FROM events WHERE seq <= ?", (CARRIED,))
    db.commit()
    db.close()
    return old


def test_an_old_journal_is_audited_and_reported(old: Path) -> None:
    for path in (old, TRACE):
        violations, report = fold_journal(path)[1].finish()
        assert violations == []
        assert report is not None
        assert (report.name, report.outcomes["env_failed"], report.outcomes["reward_failed"]) == ("laptop", 3, 1)
        assert list(report.pools["trainer"]) == ["busy", "no_work", "rollout"]
    assert number_of(old) == 0, "readers change nothing"


def test_the_words_of_an_old_journal_become_kinds(old: Path) -> None:
    for path in (old, TRACE):
        ends = {event.trajectory: event.failure for event in read_journal(path) if isinstance(event, j.TrajectoryEnded)}
        assert {int(id): failure for id, failure in ends.items() if failure is not None} == {
            3: FailureKind.INVALID,
            4: FailureKind.WORKER_LOST,
            5: FailureKind.WORKER_LOST,
            6: FailureKind.DEADLINE,
        }


def resumed(journal: Path) -> list[j.JournalEvent]:
    """What a controller of today writes when it goes on with the run."""
    state = replay(read_since_snapshot(journal))
    scenario, sink, checkpoints = load_scenario("laptop", SMALL), MemoryJournal(), SimCheckpoints()
    checkpoints.complete(Version(0, 1), "weights")

    async def main() -> None:
        await run_pipeline(scenario.config, parts(scenario, sink, checkpoints), state)

    run_virtual(main())
    return sink.events


def resume(path: Path) -> Report:
    """Go on with the run at `path` to its end; gives the report of all of it."""
    write(path, resumed(path))
    violations, report = fold_journal(path)[1].finish()
    assert violations == []
    assert report is not None
    assert (report.steps, report.stop, report.open_trajectories) == (4, StopReason.DONE, 0)
    return report


def test_an_old_run_is_resumed_and_its_journal_migrated(old: Path) -> None:
    before = rows(old)
    resume(old)
    assert number_of(old) == FORMAT
    after = rows(old)
    assert len(after) > len(before)
    changed = [new for (_, was), (_, new) in zip(before, after, strict=False) if was != new]
    assert [(event["trajectory"], event["failure"]) for event in changed] == [
        *((5, "worker_lost"), (4, "worker_lost"), (3, "invalid"), (6, "deadline"))
    ]
    write(old, [])
    assert rows(old) == after, "it is migrated once"


def without_bias(report: Report | None) -> Report:
    assert report is not None
    return msgspec.structs.replace(report, bias={}, member_bias={}, redundancy={})


def test_an_old_pruned_run_is_resumed_as_if_it_were_whole(old_pruned: Path, tmp_path: Path) -> None:
    violations, report = fold_journal(old_pruned)[1].finish()
    unpruned = fold_journal(TRACE)[1].finish()
    assert violations == unpruned[0]
    assert without_bias(report) == without_bias(unpruned[1]), "what was pruned then is not measured now"
    whole = tmp_path / "whole.sqlite"
    write(whole, read_journal(TRACE))
    assert without_bias(resume(old_pruned)) == without_bias(resume(whole))


def test_a_migration_that_is_cut_off_changes_nothing(old: Path) -> None:
    before = rows(old)
    db = sqlite3.connect(old)
    db.execute("UPDATE events SET body = x'c1' WHERE kind = 'TrajectoryEnded' AND seq = 100")
    db.execute("INSERT INTO events (kind, body) VALUES ('RunEnded', x'c1')")
    db.commit()
    db.close()
    with pytest.raises(RequestError, match="is damaged"):
        SqliteJournal(old)
    assert number_of(old) == 0
    db = sqlite3.connect(old)
    bodies = [msgspec.msgpack.decode(body) for (body,) in db.execute("SELECT body FROM events LIMIT 90")]
    db.close()
    assert bodies == [body for _, body in before[:90]]


@pytest.mark.parametrize(
    ("reason", "stop"),
    [
        ("", StopReason.DONE),
        ("interrupted", StopReason.INTERRUPTED),
        ("StalledRun: nothing moved", StopReason.STALLED),
        ("InvariantBroken: x", StopReason.INVARIANT_BROKEN),
        ("NegativeStaleness: x", StopReason.INVARIANT_BROKEN),
        ("NoEngine: all gone", StopReason.NO_ENGINE),
        ("TrainerLost: x: y", StopReason.TRAINING_FAILED),
        ("ZeroDivisionError: in the hook", StopReason.FAILED),
    ],
)
def test_why_an_old_run_stopped(reason: str, stop: StopReason) -> None:
    body = msgspec.msgpack.encode({"type": "RunEnded", "at": 1.0, "steps": 2, "reason": reason})
    assert EventReader(0).from_row("RunEnded", body) == j.RunEnded(1.0, 2, reason, stop)
    today = j.RunEnded(1.0, 2, reason, stop)
    assert EventReader(FORMAT).from_row("RunEnded", msgspec.msgpack.encode(today)) == today


def test_a_newer_journal_is_refused_with_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "run" / "journal.sqlite"
    path.parent.mkdir()
    write(path, [j.RunStarted(0.0, "", "rollart", 0, 0, {}, 1)])
    assert number_of(path) == FORMAT
    set_number(path, FORMAT + 1)
    message = (
        rf"run/journal\.sqlite: the journal is in format {FORMAT + 1}, this version of rollart reads formats up to "
        rf"{FORMAT}; use the version that wrote it, or start a new run in another folder$"
    )
    for refused in (
        fold_journal,
        SqliteJournal,
        lambda path: list(read_journal(path)),
        lambda path: list(read_since_snapshot(path)),
    ):
        with pytest.raises(RequestError, match=message):
            refused(path)
    assert number_of(path) == FORMAT + 1


def test_a_trace_names_its_format(tmp_path: Path) -> None:
    events = list(read_journal(TRACE))
    path = tmp_path / "journal.jsonl"
    write_trace(path, events)
    assert path.read_bytes().startswith(b'{"format":%d}\n' % FORMAT)
    assert list(read_journal(path)) == events
    body = path.read_bytes().partition(b"\n")[2]
    path.write_bytes(b'{"format":%d}\n' % (FORMAT + 1) + body)
    with pytest.raises(RequestError, match=rf"journal\.jsonl: the journal is in format {FORMAT + 1}"):
        list(read_journal(path))
    path.write_bytes(b'{"what":1}\n' + body)
    with pytest.raises(RequestError, match="is not a journal"):
        list(read_journal(path))


@pytest.mark.parametrize("found", [folds.OLDEST - 1, folds.FORMAT + 1])
def test_unknown_folds_are_refused(old_pruned: Path, found: int) -> None:
    db = sqlite3.connect(old_pruned)
    db.execute("UPDATE carried SET format = ?", (found,))
    db.commit()
    db.close()
    with pytest.raises(RequestError, match=rf"the pruned part of the journal is in format {found}.*start a new run"):
        fold_journal(old_pruned)
