"""`rollart eval`: which checkpoint is played, on which task, and what is refused."""

import json

import pytest
from test_commands import Command, rollart  # noqa: F401 - a fixture

TINY = ("--set", "steps=1", "--set", "eval_every=0", "--set", "checkpoint_every=1", "--set", "batch.trajectories=8")


def test_a_trained_model_plays_held_out_episodes(rollart: Command, tmp_path):  # noqa: F811
    assert rollart("train", "frozenlake", "--runtime", "inline", *TINY, "--out", tmp_path / "run").code == 0
    done = rollart("eval", tmp_path / "run", "--episodes", "8", "--json")
    assert done.code == 0, done.err
    figures = json.loads(done.out)
    assert figures["task"] == "frozenlake"
    assert figures["episodes"] == figures["scored"] == 8
    assert 0.0 <= figures["mean_reward"] <= 1.0
    again = rollart("eval", figures["checkpoint"], "--task", "frozenlake", "--episodes", "8")
    assert f"mean reward {figures['mean_reward']:.3f} over 8 of 8" in again.out
    wrong = rollart("eval", tmp_path / "run", "--task", "frozenlak")
    assert (wrong.code, wrong.out) == (2, "")
    assert "did you mean frozenlake" in wrong.err


@pytest.mark.parametrize("what", ["nothing", "empty"])
def test_what_is_no_run_is_refused(rollart: Command, tmp_path, what):  # noqa: F811
    if what == "empty":
        (tmp_path / "checkpoints").mkdir()
    done = rollart("eval", tmp_path)
    assert done.code == 2
    assert "no checkpoint yet" in done.err if what == "empty" else "neither the folder of a run" in done.err
