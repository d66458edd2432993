"""Bad input, by the real command: one sentence with the remedy, 2 before the start, 1 after it, and nothing is lost."""

import json
import subprocess
from pathlib import Path

import pytest
from real_cli import COMMAND, MAZE, Done, rollart, small_task

import rollart as api
from rollart.config.load import load_toml
from rollart.observe.journal import read_journal
from rollart.types.errors import ConfigError, TaskBroken
from rollart.types.journal import StepTrained, TrajectoryEnded
from rollart.types.trajectory import Outcome


def refused(done: Done, folder: Path, *words: str) -> None:
    """One sentence, and nothing was made."""
    assert (done.code, done.out) == (2, ""), done.err
    assert done.err.startswith("rollart: ")
    assert done.err.count("\n") == 1
    for word in words:
        assert word in done.err
    assert not (folder / "runs").exists()


# --- refused before anything starts ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("tasks.maze.max_turn=4", ("tasks.maze.max_turn: unknown key", "did you mean max_turns?")),
        ("tasks.mase.max_turns=4", ("tasks.mase.environment: is missing", "did you mean tasks.maze?")),
        ("tasks.maze.environment=maze.py:Mase", ("tasks.maze.environment: ", "did you mean Maze?")),
        ("tasks.maze.environment=mase.py:Maze", ("tasks.maze.environment: ", "there is no file", "mase.py")),
        ("tasks.maze.environment=rollart.tasks.lake:Lake", ("tasks.maze.environment: ", "cannot import")),
        ("tasks.maze.reward=maze.py:judge", ("tasks.maze.reward: ", "did you mean judged?")),
        ("codec=rollart.backends.environments.codec:Bytes", ("codec: ", "did you mean ByteCodec?")),
        ("model=nowhere", ("model: 'nowhere' is not a folder", "give a local checkpoint")),
    ],
)
def test_a_config_that_cannot_be(tmp_path: Path, assignment: str, words: tuple[str, ...]) -> None:
    small_task(tmp_path)
    refused(rollart("train", "config.toml", "--runtime", "inline", "--set", assignment, cwd=tmp_path), tmp_path, *words)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "gpt2", "vocab_size": 300}, ("pools.local.engine", "'gpt2'", "llama, qwen2, qwen3")),
        (None, ("pools.local.engine", "not a folder with a config.json")),
    ],
)
def test_a_checkpoint_of_an_unsupported_model(
    tmp_path: Path, config: dict[str, object] | None, words: tuple[str, ...]
) -> None:
    small_task(tmp_path)
    (tmp_path / "checkpoint").mkdir()
    if config is not None:
        (tmp_path / "checkpoint" / "config.json").write_text(json.dumps(config))
    refused(
        rollart("train", "config.toml", "--runtime", "inline", "--set", "model=checkpoint", cwd=tmp_path),
        tmp_path,
        *words,
    )


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (None, ("has neither model.safetensors nor",)),
        (b"version https://git-lfs.github.com/spec/v1\n", ("model.safetensors cannot be read", "download")),
        (b"\2\0\0\0\0\0\0\0{}", ("does not have the ['model.embed_tokens.weight'",)),
    ],
    ids=["missing", "a pointer", "of another model"],
)
def test_a_checkpoint_without_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: bytes | None, words: tuple[str, ...]
) -> None:
    small_task(tmp_path)
    monkeypatch.chdir(tmp_path)
    model = load_toml(tmp_path / "config.toml")["model"]["config"]
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "config.json").write_text(json.dumps(model))
    if weights is not None:
        (tmp_path / "checkpoint" / "model.safetensors").write_bytes(weights)
    with pytest.raises(ConfigError) as caught:
        api.run({**load_toml(tmp_path / "config.toml"), "model": "checkpoint"})
    assert caught.value.path == "model"
    for word in words:
        assert word in str(caught.value)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    small_task(tmp_path)
    done = rollart("train", "config.toml", "--runtime", "inline", "--out", "config.toml/run", cwd=tmp_path)
    refused(done, tmp_path, "config.toml/run: cannot create the run folder", "--out")


# --- a task that is wrong -------------------------------------------------------------------------------------------

WRONG = {
    "an observation that is not text": (
        'return f"maze {seed}", {}',
        "return 42, {}",
        "all of its 8 environments failed",
        "the observation must be text or messages: a int is not a list of messages",
    ),
    "a later observation that is not text": (
        'return "next"',
        "return None",
        "all of its 8 environments failed",
        "the observation must be text or messages: a NoneType is not a list of messages",
    ),
    "a reward of NaN": (
        "len(action) / 4",
        "float('nan')",
        "all of its 8 environments failed",
        "the reward is nan; it must be a finite number",
    ),
    "a typo in the environment": (
        'return f"maze {seed}"',
        'return f"maze {sead}"',
        "all of its 8 environments failed",
        "NameError: name 'sead' is not defined",
    ),
    "another form": (
        'return "next", len(action) / 4, not action.isascii(), False, {}',
        'return "next", 1.0, True, {}',
        "all of its 8 environments failed",
        "step must return (observation, reward, terminated, truncated, info)",
    ),
    "a reward function that gives NaN": (
        "return float(len(t.final_text))",
        "return float('nan')",
        "its reward function 'judged' failed 8 times in a row",
        "it must be a finite number",
    ),
    "a typo in the reward function": (
        "return float(len(t.final_text))",
        "return float(len(t.final_txt))",
        "its reward function 'judged' failed 8 times in a row",
        "final_txt",
    ),
}


def untrained(journal: Path) -> None:
    """Nothing came of it: no step, and no reward that was made up."""
    events = list(read_journal(journal))
    assert not [event for event in events if isinstance(event, StepTrained)]
    ends = [event for event in events if isinstance(event, TrajectoryEnded)]
    assert {end.outcome for end in ends} <= {Outcome.ENV_FAILED, Outcome.REWARD_FAILED, Outcome.CANCELLED}
    assert all(end.reward is None for end in ends)


@pytest.mark.parametrize("what", WRONG)
def test_a_task_that_is_wrong_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    right, wrong, *words = WRONG[what]
    assert right in MAZE
    small_task(tmp_path, MAZE.replace(right, wrong))
    monkeypatch.chdir(tmp_path)
    task = {"reward": "maze.py:judged"} if "reward function" in what else {}
    with pytest.raises(TaskBroken) as caught:
        api.run("config.toml", out="run", tasks={"maze": task})
    for word in ("task 'maze': ", *words):
        assert word in str(caught.value)
    untrained(tmp_path / "run" / "journal.sqlite")


def test_the_command_says_it_in_a_sentence_and_goes_on_when_the_task_is_mended(tmp_path: Path) -> None:
    small_task(tmp_path, MAZE.replace("len(action) / 4", "float('nan')"))
    done = rollart("train", "config.toml", "--runtime", "inline", "--out", "run", cwd=tmp_path)
    assert (done.code, done.out) == (1, ""), done.err
    assert done.err.splitlines()[-1] == (
        "rollart: TaskBroken: task 'maze': all of its 8 environments failed, and every try would again: "
        "the reward is nan; it must be a finite number. Fix the environment and resume."
    )
    untrained(tmp_path / "run" / "journal.sqlite")
    small_task(tmp_path)
    done = rollart("train", "--resume", "run", "--runtime", "inline", cwd=tmp_path)
    assert done.code == 0, done.err
    assert rollart("audit", "run", cwd=tmp_path).code == 0


# --- a full disk ----------------------------------------------------------------------------------------------------

SMALL_DISK = """
set -e
mount -t tmpfs -o size=6m tmpfs disk
set +e
large="--set model.config.intermediate_size=4096"
"$@" train config.toml --runtime inline --set steps=40 --set transcripts_mb=0 $large --out disk/run 2> first.err
echo $? > first.code
set -e
mount -o remount,size=64m disk
"$@" train --resume disk/run --runtime inline 2> second.err
"$@" audit disk/run > audit.out
"""


@pytest.mark.long
def test_a_full_disk_stops_the_run_which_goes_on_when_there_is_room(tmp_path: Path) -> None:
    """Room for two checkpoints of 2.4 MB and for the journal, and not for a third."""
    own_mounts = ["unshare", "--map-root-user", "--mount"]
    if subprocess.run([*own_mounts, "mount", "-t", "tmpfs", "tmpfs", tmp_path], check=False).returncode:
        pytest.skip("a small disk cannot be mounted here")
    small_task(tmp_path)
    (tmp_path / "disk").mkdir()
    command = [*own_mounts, "sh", "-c", SMALL_DISK, "sh", *COMMAND]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False)
    first, second = ((tmp_path / f"{name}.err").read_text() for name in ("first", "second"))
    assert (tmp_path / "first.code").read_text() == "1\n", first
    assert "Traceback" not in first
    assert "The previous one is intact; free some space" in first
    last = first.splitlines()[-1]
    assert last.startswith("rollart: ")
    assert "cannot be written" in last or "could not be saved" in last
    assert done.returncode == 0, done.stderr + second
    assert "step 1/40" not in second, "it went on from a checkpoint"
    assert "step 40/40" in second
    assert "0 violations" in (tmp_path / "audit.out").read_text()
