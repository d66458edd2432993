"""The data of the page: workers, slots and failures from the journal, bounded, whatever state the run is in."""

from pathlib import Path

import msgspec
import pytest
from journals import SEEDS, troubled, write

from rollart.observe.page.data import gather
from rollart.observe.page.html import as_script_text, render
from rollart.observe.page.samples import MOST_SAMPLES, Part, Sample, Token, read_samples
from rollart.observe.page.slots import SlotFold
from rollart.observe.page.strips import MOST_BINS, Strips
from rollart.observe.page.timeline import MOST_ROWS, MOST_SPANS, Span, TimelineFold, fewer
from rollart.types import journal as j
from rollart.types.errors import RequestError
from rollart.types.failures import FailureKind, StopReason
from rollart.types.ids import GroupId, PromptId, TrajectoryId, WorkerId
from rollart.types.messages import Role
from rollart.types.trajectory import Outcome, Purpose
from rollart.types.versions import Version

SLOT = "environment/maze/0.0#3"
ENGINE = WorkerId("engine/fast/0.0")
HUNG = f"{SLOT} for trajectory 7: step took longer than 2 s; it gets a fresh one"


def started(at: float, trajectory: int, slot: str = SLOT) -> list[j.JournalEvent]:
    group = GroupId(trajectory)
    return [
        j.GroupOpened(at, group, "maze", PromptId("1"), Purpose.TRAIN, 0, 0),
        j.TrajectoryStarted(at, TrajectoryId(trajectory), group, 0, 0, slot),
    ]


def placed(at: float, trajectory: int) -> j.Placed:
    return j.Placed(at, TrajectoryId(trajectory), ENGINE, "fast")


def turned(at: float, trajectory: int, sampled: int = 4) -> j.TurnEnded:
    return j.TurnEnded(at, TrajectoryId(trajectory), 1, ENGINE, sampled, 0, 0, 0, ((Version(0, 0), sampled),))


def ended(
    at: float, trajectory: int, outcome: Outcome, cause: str = "", failure: FailureKind | None = None
) -> j.TrajectoryEnded:
    reward = 1.0 if outcome is Outcome.COMPLETED else None
    return j.TrajectoryEnded(at, TrajectoryId(trajectory), outcome, 1, 4, reward, cause=cause, failure=failure)


def slots_of(*events: j.JournalEvent) -> SlotFold:
    fold = SlotFold()
    for event in events:
        fold.take(event, event.at)
    fold.finish(events[-1].at)
    return fold


# --- slots ----------------------------------------------------------------------------------------------------------


def test_a_hang_is_named_by_its_slot_with_how_long_and_what_was_done() -> None:
    fold = slots_of(
        *started(0.0, 7),
        placed(0.1, 7),
        turned(0.5, 7),
        ended(2.5, 7, Outcome.ENV_FAILED, HUNG, FailureKind.DEADLINE),
        *started(3.5, 8),
    )
    (failure,) = fold.failures
    assert (failure.part, failure.what, failure.hung) == (SLOT, "step", True)
    assert failure.at - failure.since == pytest.approx(2.0)
    assert failure.done == "the slot gets a fresh environment; next episode there after 1.0 s"
    (slot,) = fold.slowest()
    assert (slot.longest, slot.failures, slot.episodes) == ("step that failed", 1, 2)
    assert slot.longest_s == pytest.approx(2.0)
    assert slot.reset_s == pytest.approx(0.1)


def test_a_slot_that_is_set_aside_or_given_up() -> None:
    for until, done in ((62.0, "the slot is set aside for 60 s after 3 failures"), (-1.0, "the slot is given up")):
        fold = slots_of(
            *started(0.0, 7),
            j.Quarantined(2.0, SLOT, 3, until, HUNG),
            ended(2.0, 7, Outcome.ENV_FAILED, HUNG, FailureKind.DEADLINE),
        )
        assert fold.failures[0].done == done
        assert fold.failures[0].what == "reset"


def test_the_first_turn_is_not_the_environments_time() -> None:
    (slot,) = slots_of(
        *started(0.0, 1), placed(0.2, 1), turned(9.0, 1), turned(9.5, 1), ended(9.6, 1, Outcome.COMPLETED)
    ).slowest()
    assert slot.longest == "step and turn"
    assert slot.longest_s == pytest.approx(0.5)


def test_what_is_open_when_the_journal_ends_has_taken_until_then() -> None:
    (slot,) = slots_of(*started(0.0, 1), placed(0.2, 1), turned(1.0, 1), j.StallReported(31.0, ())).slowest()
    assert slot.longest == "step, still open"
    assert slot.longest_s == pytest.approx(30.0)


def test_failures_of_engines_and_rewards_are_not_blamed_on_the_slot() -> None:
    fold = slots_of(
        *started(0.0, 1),
        placed(0.1, 1),
        ended(5.0, 1, Outcome.ENGINE_FAILED, "no engine"),
        *started(6.0, 2),
        placed(6.1, 2),
        turned(6.2, 2),
        ended(9.0, 2, Outcome.REWARD_FAILED, "503"),
    )
    assert [failure.part for failure in fold.failures] == [ENGINE, "reward"]
    assert fold.slots[SLOT].failures == 0


# --- timeline -------------------------------------------------------------------------------------------------------


def test_strips_keep_their_sum_and_their_bound() -> None:
    strips = Strips()
    for second in range(5000):
        strips.add("a", float(second), 2.0)
        strips.add_span("b", second + 0.25, second + 1.0)
    assert sum(strips.rows["a"]) == pytest.approx(10_000)
    assert sum(strips.rows["b"]) == pytest.approx(3750)
    assert all(len(bins) <= MOST_BINS for bins in strips.rows.values())


def test_every_kind_of_worker_has_its_row() -> None:
    fold = TimelineFold()
    events: list[j.JournalEvent] = [
        j.RunStarted(100.0, "r", "rollart", 1, 0, {"maze": 1}, 1),
        j.WorkerSpawned(100.0, ENGINE, Role.ENGINE, "fast"),
        j.WorkerJoined(101.0, ENGINE),
        *started(101.0, 7),
        placed(101.1, 7),
        turned(102.0, 7, sampled=40),
        ended(104.0, 7, Outcome.ENV_FAILED, HUNG, FailureKind.DEADLINE),
        *started(104.0, 8),
        placed(104.1, 8),
        turned(104.5, 8),
        j.RewardArrived(104.6, TrajectoryId(8), 1.0),
        ended(104.6, 8, Outcome.COMPLETED),
        j.WeightsSynced(105.0, Version(0, 1), 0.25, 0.5),
        j.StepTrained(106.0, 0, Version(0, 1), 1.0, {}),
        j.VersionPublished(106.5, Version(0, 1), 10),
        j.CheckpointSaved(107.0, Version(0, 1)),
        j.WorkerDied(108.0, ENGINE, "gone", "restarted"),
    ]
    for event in events:
        fold.take(event)
    timeline = fold.finish()
    rows = {row.name: row for row in timeline.rows}
    assert list(rows) == ["engine/fast/0", "environment/maze/0", "reward", "trainer", "weight sync"]
    assert timeline.seconds == 8.0
    engine = rows["engine/fast/0"]
    assert sum(engine.values) * timeline.bin_s == pytest.approx(44)
    assert engine.spans[0] == Span(0.0, 1.0, "starting", ENGINE)
    assert engine.marks[0].note == f"{ENGINE} was lost: gone (restarted)"
    (hung,) = rows["environment/maze/0"].spans
    assert (hung.start, hung.end, hung.kind) == (2.0, 4.0, "hung")
    assert SLOT in hung.note
    assert [tuple(span)[:3] for span in map(msgspec.structs.astuple, rows["trainer"].spans)] == [
        (5.0, 6.0, "training"),
        (6.0, 6.5, "publication"),
        (6.5, 7.0, "checkpoint"),
    ]
    assert [span.kind for span in rows["weight sync"].spans] == ["waiting", "suspended"]
    assert rows["weight sync"].spans[0].start == pytest.approx(4.25)


def test_a_resumed_run_has_one_clock() -> None:
    fold = TimelineFold()
    for event in (
        j.RunStarted(500.0, "r", "rollart", 1, 0, {}, 1),
        j.StallReported(510.0, ()),
        j.RunResumed(3.0, "rollart", 1),
        j.StallReported(5.0, ()),
    ):
        fold.take(event)
    timeline = fold.finish()
    assert timeline.seconds == 12.0
    assert timeline.resumed == [10.0]


def test_many_workers_and_many_spans_are_bounded() -> None:
    fold = TimelineFold()
    for index in range(100):
        worker = WorkerId(f"engine/fast/{index}.0")
        fold.take(j.WorkerSpawned(0.0, worker, Role.ENGINE, "fast"))
        fold.take(j.TurnEnded(1.0, TrajectoryId(1), 1, worker, 5, 0, 0, 0, ()))
    for step in range(3 * MOST_SPANS):
        fold.take(j.StepTrained(2.0 + step, step, Version(0, step), 0.9, {}))
    timeline = fold.finish()
    engines = [row for row in timeline.rows if row.unit == "tokens/s"]
    assert len(engines) == MOST_ROWS + 1
    assert engines[-1].name == f"{100 - MOST_ROWS} more"
    assert sum(sum(row.values) for row in engines) * timeline.bin_s == pytest.approx(500, rel=0.01)
    assert len(next(row for row in timeline.rows if row.name == "trainer").spans) <= MOST_SPANS


def test_merging_spans_never_hides_a_hang() -> None:
    spans = [Span(i, i + 0.9, "training") for i in range(2000)] + [Span(2000, 2001, "hung", "slot 3")]
    kept = fewer(spans, 100, 2001.0)
    assert len(kept) <= 100
    assert kept[-1].note == "slot 3"


# --- whole journals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_runs_with_much_trouble_have_a_page(seed: int, tmp_path: Path) -> None:
    events = troubled(seed)
    write(tmp_path / "journal.sqlite", events)
    data = gather(tmp_path / "journal.sqlite", tmp_path / "trajectories")
    assert data.complete
    assert data.audit.violations == 0
    assert data.audit.events == len(events)
    lost = [mark for row in data.timeline.rows for mark in row.marks if mark.kind == "lost" and "was lost" in mark.note]
    assert len(lost) == data.report.workers_lost > 0
    assert len(data.timeline.resumed) == 2
    assert data.steps[-1].step == data.report.steps
    failed = sum(isinstance(event, j.TrajectoryEnded) and event.outcome.value.endswith("failed") for event in events)
    assert data.failed == failed
    assert data.failed >= len(data.failures)


def test_a_pruned_journal_has_a_page_with_the_totals_of_the_whole_run(tmp_path: Path) -> None:
    events = troubled(SEEDS[0])
    write(tmp_path / "whole.sqlite", events)
    write(tmp_path / "pruned.sqlite", events, limit_bytes=1)
    whole = gather(tmp_path / "whole.sqlite", tmp_path)
    pruned = gather(tmp_path / "pruned.sqlite", tmp_path)
    assert pruned.audit.pruned
    assert pruned.report == whole.report
    assert len(pruned.timeline.rows) > 2


def test_a_journal_that_was_cut_off_anywhere_has_a_page(tmp_path: Path) -> None:
    events = troubled(SEEDS[1])
    for part in (1, 2, 20, len(events) // 3, len(events) // 2):
        path = tmp_path / f"{part}.sqlite"
        write(path, events[:part])
        data = gather(path, tmp_path)
        assert data.report.ended == ""
        assert "data" in render(data)


def test_a_folder_without_a_journal_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no journal"):
        gather(tmp_path / "journal.sqlite", tmp_path)


# --- samples and markup ---------------------------------------------------------------------------------------------


def sample(number: int, *, task: str = "maze", kind: str = "train", text: str = "o") -> Sample:
    part = Part(tokens=(Token(text, 1, -0.5, 0),), turn=1)
    return Sample(number, task, kind, "1", number, "completed", 1.0, "", ("v0.1",), (Part(text=text), part))


def test_samples_are_some_of_every_task_and_kind_with_both_ends(tmp_path: Path) -> None:
    for step in range(100):
        lines = [sample(step), sample(step, kind="failed"), sample(step, task="other")]
        (tmp_path / f"step-{step:06}.jsonl").write_bytes(b"\n".join(map(msgspec.json.encode, lines)) + b'\n{"cut')
    chosen = read_samples(tmp_path)
    assert len(chosen) == MOST_SAMPLES
    for task, kind in (("maze", "train"), ("maze", "failed"), ("other", "train")):
        steps = [each.step for each in chosen if (each.task, each.kind) == (task, kind)]
        assert len(steps) == MOST_SAMPLES // 3
        assert (steps[0], steps[-1]) == (0, 99)


def test_nothing_of_a_run_can_end_the_data_element(tmp_path: Path) -> None:
    evil = "</script><!--<script>&amp;\u2028"
    write(
        tmp_path / "journal.sqlite",
        [j.RunStarted(0.0, evil, evil, 1, 0, {}, 1), j.RunEnded(1.0, 0, evil, StopReason.FAILED)],
    )
    (tmp_path / "step-000000.jsonl").write_bytes(msgspec.json.encode(sample(0, text=evil)) + b"\n")
    data = gather(tmp_path / "journal.sqlite", tmp_path, config={"name": evil})
    page = render(data)
    assert page.count("</script>") == 2
    assert "<!--" not in page
    _, _, rest = page.partition('id="data">')
    inside, _, _ = rest.partition("</script>")
    assert msgspec.json.decode(inside)["name"] == evil
    assert as_script_text('"<>&"') == '"\\u003c\\u003e\\u0026"'


def test_the_page_names_nothing_to_load(tmp_path: Path) -> None:
    write(tmp_path / "journal.sqlite", [j.RunStarted(0.0, "r", "rollart", 1, 0, {}, 1)])
    page = render(gather(tmp_path / "journal.sqlite", tmp_path))
    page = page.replace("http://www.w3.org/2000/svg", "")  # a namespace, which is never loaded
    for sign in ("http:", "https:", " src=", "@import", "url("):
        assert sign not in page
