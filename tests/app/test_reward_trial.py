"""`rollart reward try`: what another reward function would have changed."""

import json
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from rollart.app.reward_trial import try_reward
from rollart.app.transcript_store import TranscriptStore
from rollart.cli.main import app
from rollart.types.errors import RequestError
from rollart.types.ids import GroupId, PromptId, TrajectoryId
from rollart.types.rewards import RewardRule, RewardSheet
from rollart.types.trajectory import Outcome, Prompt, Purpose, Trajectory
from rollart.types.transcript import Transcript, TranscriptTurn, pack

REWARDS = """
def length(t):
    return len(t.final_text)

def parts(t) -> dict[str, float]:
    return {"length": len(t.final_text), "one": 1.0}

async def rank(group: list) -> list[float]:
    return [float(sorted(t.final_text for t in group).index(each.final_text)) for each in group]

def picky(t):
    if t.final_text == "bb":
        raise ValueError("not bb [/INST]")
    return 1.0

def text(t):
    return t.final_text
"""


def keep(store: TranscriptStore, number: int, group: int, action: str, reward: float | None, task: str = "say") -> None:
    prompt = Prompt(PromptId("p"), task, 1)
    made = Trajectory(
        id=TrajectoryId(number),
        group=GroupId(group),
        member=number % 2,
        attempt=0,
        task=task,
        purpose=Purpose.TRAIN,
        prompt=prompt,
    )
    made.reward, made.outcome = reward, Outcome.REWARD_FAILED if reward is None else Outcome.COMPLETED
    made.rewards = RewardSheet((RewardRule("style", weight=2.0),))
    if reward is not None:
        made.rewards.enter("style", reward / 2)
    made.transcript = pack(
        Transcript(
            task=task,
            trajectory=made.id,
            prompt_id=prompt.id,
            seed=1,
            member=made.member,
            turns=(TranscriptTurn("?", action),),
        )
    )
    store.ended(made)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two groups of a task, one trajectory whose reward had failed, and one of another task."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    store = TranscriptStore(folder / "transcripts", 10**6, print)
    keep(store, 0, 0, "a", 1.0)
    keep(store, 1, 0, "bb", 2.0)
    keep(store, 2, 1, "ccc", 0.0)
    keep(store, 3, 1, "dddd", None)
    keep(store, 4, 2, "e", 1.0, task="other")
    (tmp_path / "mine.py").write_text(REWARDS.replace("group: list)", "group: list[rollart.Transcript])"))
    text = (tmp_path / "mine.py").read_text()
    (tmp_path / "mine.py").write_text("import rollart\n" + text)
    return folder


def function(run: Path, name: str) -> str:
    return f"{run.parent / 'mine.py'}:{name}"


def test_what_changes_comes_first_and_means_are_of_what_has_both(run: Path) -> None:
    trial = try_reward(function(run, "length"), run, task="say")
    (say,) = trial.tasks
    assert (say.scored, say.failed, say.changed) == (4, 0, 2)
    assert (say.before, say.after) == (1.0, 2.0), "of 1, 2, 0 and of 1, 2, 3"
    assert [(each.trajectory, each.before, each.after) for each in trial.transcripts] == [
        (3, None, 4.0),
        (2, 0.0, 3.0),
        (0, 1.0, 1.0),
        (1, 2.0, 2.0),
    ]


def test_all_tasks_and_named_parts(run: Path) -> None:
    trial = try_reward(function(run, "parts"), run)
    assert [task.task for task in trial.tasks] == ["other", "say"]
    assert {each.trajectory: each.parts for each in trial.transcripts}[2] == {"length": 3.0, "one": 1.0}


def test_one_of_several_rewards_is_compared(run: Path) -> None:
    trial = try_reward(function(run, "length"), run, task="say", reward="style")
    assert {each.trajectory: each.before for each in trial.transcripts} == {0: 0.5, 1: 1.0, 2: 0.0, 3: None}
    with pytest.raises(RequestError, match="there are style"):
        try_reward(function(run, "length"), run, reward="stile")


def test_a_group_is_scored_with_those_of_its_members_that_had_a_result(run: Path) -> None:
    trial = try_reward(function(run, "rank"), run, task="say")
    assert {each.trajectory: each.after for each in trial.transcripts} == {0: 0.0, 1: 1.0, 2: 0.0}


def test_a_damaged_transcript_fails_its_group_only(run: Path) -> None:
    store = TranscriptStore(run / "transcripts", 10**6, print)
    keep(store, 6, 1, "x", 1.0)
    (last,) = (run / "transcripts").glob("000002.bin")
    body = msgspec.msgpack.decode(last.read_bytes()[4:])
    damaged = msgspec.msgpack.encode(body | {"packed": b"junk"})
    last.write_bytes(len(damaged).to_bytes(4, "little") + damaged)
    after = {each.trajectory: each.after for each in try_reward(function(run, "rank"), run, task="say").transcripts}
    assert after == {0: 0.0, 1: 1.0, 2: None, 6: None}


def test_a_failure_is_shown_and_is_no_reward(run: Path) -> None:
    trial = try_reward(function(run, "picky"), run, task="say")
    (say,) = trial.tasks
    assert (say.scored, say.failed) == (3, 1)
    (failed,) = [each for each in trial.transcripts if each.after is None]
    assert (failed.trajectory, failed.error) == (1, "ValueError: not bb [/INST]")
    assert "must be a finite number" in try_reward(function(run, "text"), run).transcripts[0].error


def test_requests_that_cannot_be_answered(run: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"no config\.json"):
        try_reward(function(run, "length"), tmp_path)
    with pytest.raises(RequestError, match="no transcripts of task 'nothing'"):
        try_reward(function(run, "length"), run, task="nothing")


def test_the_command(run: Path) -> None:
    done = CliRunner().invoke(app, ["reward", "try", function(run, "length"), str(run), "--json"])
    assert done.exit_code == 0
    printed = json.loads(done.stdout)
    assert printed["compared_with"] == "reward"
    assert {task["task"] for task in printed["tasks"]} == {"say", "other"}
    table = CliRunner().invoke(app, ["reward", "try", function(run, "picky"), str(run), "--task", "say"])
    assert table.exit_code == 0
    assert "largest changes" in table.stdout
    assert "not bb [/INST]" in table.stdout, "nothing of it is markup"
