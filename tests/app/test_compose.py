"""From a config to the parts of a run: the model that is made, the codec that fits it, the prompts."""

import json
import sys
from importlib import resources
from pathlib import Path

import pytest

from rollart.app import running
from rollart.app.compose import BYTE_CODEC, HF_CODEC, check_real, codec_factory, process_store, worker_specs
from rollart.app.task_checks import prompts_of
from rollart.config.load import check, load_toml
from rollart.config.schema import RunConfig
from rollart.types.errors import ConfigError, RunError
from rollart.types.messages import Role


def config(**changes):
    tasks = {"lake": {"environment": "rollart.tasks.frozenlake:FrozenLake", **changes.pop("task", {})}}
    model = {"config": {"model_type": "qwen3", "vocab_size": 300}}
    return check(RunConfig, {"tasks": tasks, "pools": {"local": {}}, "model": model, **changes})


def test_the_quickstart_is_a_run():
    with resources.as_file(resources.files("rollart.config") / "presets" / "quickstart.toml") as path:
        quickstart = check(RunConfig, load_toml(path))
    check_real(quickstart)
    specs = worker_specs(quickstart, None, None)
    assert {spec.hardware for spec in specs if spec.role is Role.ENGINE} == {"compute", "bandwidth"}
    assert set(quickstart.tasks) == {"frozenlake", "math", "game"}


def test_a_model_that_is_to_be_made_is_made_once(tmp_path, monkeypatch):
    made = []

    def make(module, order):
        made.append((module, order["seed"], order["steps"]))
        Path(order["folder"]).mkdir()

    monkeypatch.setattr(running, "_make_model", make)
    wanted = config(model={"cold_start": {"steps": 3}}, seed=7)
    for _ in range(2):
        assert running.with_model(wanted, tmp_path).model == str(tmp_path / "model")
    assert made == [("cold_start", 7, 3)]
    assert running.with_model(config(), tmp_path).model == config().model


@pytest.mark.long
def test_the_model_is_made_in_a_process_of_its_own(tmp_path, capsys):
    made = running.with_model(config(model={"cold_start": {"steps": 1, "batch_tokens": 64}}), tmp_path).model
    assert (Path(made) / "model.safetensors").is_file()
    assert "cold start: took" in capsys.readouterr().err
    wrong = config(model={"cold_start": {"steps": 0}})
    with pytest.raises(RunError, match="creating the model failed"):
        running.with_model(wrong, tmp_path / "other")


@pytest.mark.timeout(120)
def test_many_errors_do_not_block_the_process_that_makes_a_model(tmp_path, monkeypatch, capsys):
    """More than a pipe takes, before its other output ends."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nhead -c 300000 /dev/zero | tr '\\0' '.' >&2\necho made\necho wrong >&2\nexit 3\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(RunError, match=r"creating the model failed: \.+wrong$"):
        running._make_model("cold_start", {})
    assert "made" in capsys.readouterr().err


def test_two_runs_of_equal_process_ids_have_stores_of_their_own(tmp_path):
    """Containers may share /dev/shm."""
    small = {"model_type": "qwen3", "vocab_size": 300, "hidden_size": 16, "intermediate_size": 16}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    made = config(model={"config": small | heads})
    with process_store(made, tmp_path) as first, process_store(made, tmp_path) as second:
        assert first is not second


def test_threads_of_a_cold_start_sleep_while_they_wait(tmp_path, monkeypatch, capsys):
    """A stand-in for Python prints what it was given."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "waits: $OMP_WAIT_POLICY"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    running._make_model("cold_start", {})
    assert "waits: PASSIVE" in capsys.readouterr().err
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    running._make_model("cold_start", {})
    assert "waits: ACTIVE" in capsys.readouterr().err


def test_the_codec_is_that_of_the_models_folder(tmp_path):
    assert codec_factory(config()) == (BYTE_CODEC, {})
    assert codec_factory(config(model=str(tmp_path))) == (BYTE_CODEC, {})
    (tmp_path / "tokenizer.json").write_text("{}")
    assert codec_factory(config(model=str(tmp_path))) == (HF_CODEC, {"folder": str(tmp_path)})
    assert codec_factory(config(model=str(tmp_path), codec="a:B")) == ("a:B", {})


def test_prompts_of_a_file_are_held_out_by_content(tmp_path):
    lines = tmp_path / "prompts.jsonl"
    lines.write_text("".join(json.dumps({"question": number}) + "\n" for number in range(40)))
    fitting = config(task={"prompts": str(lines)})
    train, held_out = (prompts_of(fitting, "lake", held_out=side) for side in (False, True))
    seen = [{train.next().data["question"] for _ in range(80)}, {held_out.next().data["question"] for _ in range(80)}]
    assert seen[0] | seen[1] == set(range(40))
    assert not seen[0] & seen[1]


def test_prompts_that_are_not_there_are_refused_by_their_key(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.jsonl") as caught:
        check_real(config(task={"prompts": str(tmp_path / "none.jsonl")}))
    assert caught.value.path == "tasks.lake.prompts"


def test_tasks_with_the_same_reward_function_share_its_workers():
    own = "rollart.backends.rewards.functions:episode_return"
    tasks = {"lake": {}, "river": {}, "sea": {"reward": "builtins:max"}}
    shared = RunConfig(tasks=tasks, pools={"local": {}}, batch={"trajectories": 24}, reward_workers=2)
    rewards = {
        spec.name: (spec.settings["function"], spec.settings["rewards"])
        for spec in worker_specs(shared, None, None)
        if spec.role is Role.REWARD
    }
    assert rewards == {
        "reward/lake/0": (own, ("lake/episode_return", "river/episode_return")),
        "reward/lake/1": (own, ("lake/episode_return", "river/episode_return")),
        "reward/sea/0": ("builtins:max", ("sea/max",)),
        "reward/sea/1": ("builtins:max", ("sea/max",)),
    }
