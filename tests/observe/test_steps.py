"""Steps as they happen: what a record counts, when it comes, and what lies in the run folder of it."""

import asyncio
import json
import struct
import subprocess
import sys

import pytest

from rollart.observe.files import append_whole
from rollart.observe.journal import MemoryJournal
from rollart.observe.metrics import LINES, MetricsSink, scalars
from rollart.observe.steps import EvalRecord, StepFold, StepRecord
from rollart.sim.run import simulate
from rollart.sim.scenario import load_scenario
from rollart.types import journal as j
from rollart.types.errors import RunError
from rollart.types.ids import ClaimId, GroupId, PromptId, TrajectoryId, WorkerId
from rollart.types.trajectory import Outcome, Purpose
from rollart.types.versions import Version

V0, V1, V2 = (Version(0, step) for step in range(3))
ENGINE = WorkerId("engine/a/0")


def turn(at, sampled):
    return j.TurnEnded(at, TrajectoryId(1), 1, ENGINE, sampled, 5, 0, 0, ((V0, sampled),))


def ended(at, outcome=Outcome.COMPLETED):
    return j.TrajectoryEnded(at, TrajectoryId(1), outcome, 1, 3, 1.0, V0, V0)


def claimed(at, claim):
    groups = (GroupId(claim), GroupId(claim + 1))
    trajectories = (TrajectoryId(1), TrajectoryId(2))
    return j.BatchClaimed(
        at, ClaimId(claim), claim, V0, V0, groups, trajectories, (0, 1), (0, 1), (), {"maze": 0.25 * (claim + 1)}
    )


JOURNAL = [
    j.RunStarted(10.0, "run", "rollart", 1, 0, {"maze": 2}, 1),
    j.GroupOpened(10.0, GroupId(0), "maze", PromptId(0), Purpose.TRAIN, 0, 0),
    j.TrajectoryStarted(10.0, TrajectoryId(1), GroupId(0), 0, 0, "slot"),
    turn(11.0, 30),
    ended(12.0),
    ended(12.0, Outcome.ENV_FAILED),
    claimed(13.0, 0),
    j.StepTrained(15.0, ClaimId(0), V1, 2.0, {"loss": 0.5}),
    j.PoolTime(15.0, "a", {"busy": 3.0, "rollout": 1.0}),
    j.PoolTime(15.0, "trainer", {"busy": 0.0}),
    j.WeightsSynced(15.5, V1, 0.125, 0.0),
    turn(16.0, 10),
    j.EvalEnded(17.0, "maze", 1, 8, 8, 0.75),
    claimed(18.0, 1),
    j.StepTrained(20.0, ClaimId(1), V2, 1.0, {}),
    j.RunEnded(21.0, 2),
]


def test_every_step_of_a_run_says_how_busy_its_pools_were():
    fold = StepFold()
    ran = simulate(load_scenario("laptop", ["steps=3"]))
    steps = [record for event in ran.events for record in fold.take(event)] + fold.finish()
    assert [set(step.busy) for step in steps if isinstance(step, StepRecord)] == [
        {"fast", "wide", "environments", "reward", "trainer"}
    ] * 3


def records():
    fold = StepFold()
    return [record for event in JOURNAL for record in fold.take(event)] + fold.finish()


def test_a_step_counts_what_came_since_the_one_before():
    first, evaluation, second = records()
    assert first == StepRecord(
        step=1,
        at=5.0,
        train_s=2.0,
        rewards={"maze": 1.0},
        kept_rewards={"maze": 0.25},
        staleness=[0, 1],
        trajectories=2,
        outcomes={"completed": 1, "env_failed": 1},
        sampled_tokens=30,
        tokens_per_s=6.0,
        busy={"a": 0.75},
        metrics={"loss": 0.5},
    )
    assert evaluation == EvalRecord(step=1, at=7.0, task="maze", episodes=8, mean_reward=0.75)
    assert (second.sampled_tokens, second.tokens_per_s, second.suspended_s) == (10, 2.0, 0.125)
    assert second.outcomes == {}
    assert second.rewards == {}, "nothing finished"
    assert second.kept_rewards == {"maze": 0.5}


def test_a_step_is_told_with_the_first_event_after_its_pools():
    fold = StepFold()
    counts = [len(fold.take(event)) for event in JOURNAL]
    assert counts == [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 1, 0, 0, 1]


def test_the_lines_of_a_run_and_of_the_one_that_goes_on(tmp_path):
    for _ in range(2):
        journal = MemoryJournal()
        sink = MetricsSink(journal, tmp_path)
        for event in JOURNAL[:-1]:
            sink.append(event)
        asyncio.run(sink.close())
        assert journal.events == JOURNAL[:-1]
    lines = [json.loads(line) for line in (tmp_path / LINES).read_text().splitlines()]
    assert [(line["type"], line["step"]) for line in lines] == [("step", 1), ("eval", 1), ("step", 2)] * 2


def test_what_cannot_be_written_is_raised_by_the_next_flush(tmp_path):
    sink = MetricsSink(MemoryJournal(), tmp_path)
    (tmp_path / LINES).mkdir()
    for event in JOURNAL:
        sink.append(event)
    with pytest.raises(RunError, match=r"metrics.jsonl cannot be written.*Free space and resume"):
        asyncio.run(sink.flush())


def test_numbers_have_names():
    first, evaluation, _ = records()
    assert scalars(evaluation) == {"held_out/maze": 0.75}
    assert scalars(first)["reward/maze"] == 1.0
    assert scalars(first)["kept_reward/maze"] == 0.25
    assert scalars(first)["rollout/staleness_max"] == 1.0
    assert scalars(first)["busy/a"] == 0.75


def events_of(file):
    from tensorboardX.proto.event_pb2 import Event

    data = file.read_bytes()
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        yield Event.FromString(data[12 : 12 + length])
        data = data[16 + length :]


def test_tensorboard_files_where_its_writer_is_there(tmp_path):
    pytest.importorskip("tensorboardX", reason="needs tensorboardX")
    sink = MetricsSink(MemoryJournal(), tmp_path)
    for event in JOURNAL:
        sink.append(event)
    asyncio.run(sink.close())
    (file,) = (tmp_path / "tensorboard").iterdir()
    assert file.name.startswith("events.out.tfevents.")
    seen = [(event.step, value.tag, value.simple_value) for event in events_of(file) for value in event.summary.value]
    assert (1, "reward/maze", 1.0) in seen
    assert (1, "kept_reward/maze", 0.25) in seen
    assert (1, "held_out/maze", 0.75) in seen


def test_a_trainer_that_starts_again_hides_what_was_told_beyond_its_step(tmp_path):
    pytest.importorskip("tensorboardX", reason="needs tensorboardX")
    from tensorboardX.proto.event_pb2 import SessionLog

    sink = MetricsSink(MemoryJournal(), tmp_path)
    for epoch, step in enumerate((0, 4)):
        sink.append(j.EpochStarted(0.0, epoch, step))
    asyncio.run(sink.close())
    (file,) = (tmp_path / "tensorboard").iterdir()
    starts = [event.step for event in events_of(file) if event.session_log.status == SessionLog.START]
    assert starts == [1, 5]


def test_a_line_that_was_cut_is_taken_away(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st')
    MetricsSink(MemoryJournal(), tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_what_a_full_disk_cuts_off_is_taken_back(tmp_path):
    path = tmp_path / "lines"
    append_whole(path, b"one\n")
    code = (
        "import resource, signal, sys\nfrom pathlib import Path\nfrom rollart.observe.files import append_whole\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\nresource.setrlimit(resource.RLIMIT_FSIZE, (6, 6))\n"
        "append_whole(Path(sys.argv[1]), b'two\\n')"
    )
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=False)
    assert "OSError" in done.stderr
    assert path.read_bytes() == b"one\n"
