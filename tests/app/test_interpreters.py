"""`pools.NAME.python`: engines that run with another interpreter than the controller."""

import importlib.util
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from other_python import other_python
from real_cli import COMMAND, rollart, small_task

from rollart.app.compose import check_interpreters, check_real, worker_specs
from rollart.app.evaluation import config_for
from rollart.config.load import check
from rollart.config.schema import RunConfig
from rollart.types.errors import ConfigError
from rollart.types.messages import Role


def config(pool: dict[str, Any], **changes: Any) -> RunConfig:
    tasks = {"lake": {"environment": "rollart.tasks.frozenlake:FrozenLake"}}
    model = {"config": {"model_type": "qwen3", "vocab_size": 300}}
    return check(RunConfig, {"tasks": tasks, "pools": {"other": pool}, "model": model, **changes})


def noting_python(folder: Path) -> tuple[Path, Path]:
    """An interpreter of its own, in a path with a blank, and a file that gets its first argument at every start."""
    folder = folder / "with blank"
    real, notes, python = other_python(folder / "environment"), folder / "notes", folder / "python"
    python.write_text(f'#!/bin/sh\necho "$1" >> {shlex.quote(str(notes))}\nexec {shlex.quote(real)} "$@"\n')
    python.chmod(0o755)
    return python, notes


def test_engines_have_the_interpreter_of_their_pool_and_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    specs = worker_specs(config({"python": "environment/bin/python"}), None, None)
    for spec in specs:
        assert spec.python == (str(tmp_path / "environment/bin/python") if spec.role is Role.ENGINE else "")


@pytest.mark.parametrize("name", ["missing", "folder", "not-executable"])
def test_a_path_that_cannot_be_run_is_refused_by_its_key(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "not-executable").write_text("#!/bin/sh\n")
    with pytest.raises(ConfigError, match=name) as refused:
        check_real(config({"python": str(tmp_path / name)}))
    assert refused.value.path == "pools.other.python"


def test_the_inline_runtime_refuses_it_by_its_key(tmp_path: Path) -> None:
    small_task(tmp_path)
    words = ("--set", f"pools.local.python={sys.executable}")
    done = rollart("train", "config.toml", "--runtime", "inline", *words, cwd=tmp_path)
    assert done.code == 2
    assert done.err.startswith("rollart: pools.local.python: ")
    assert done.err.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_one_of_other_versions_is_refused_by_its_key(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'rollart[ray]'")
    answer = json.dumps({"python": [3, 9], "ray": "", "rollart": "", "problem": "", "missing": []})
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho '{answer}'\n")
    python.chmod(0o755)
    with pytest.raises(ConfigError, match=r"is Python 3\.9") as refused:
        check_interpreters(config({"python": str(python)}), processes=True)
    assert refused.value.path == "pools.other.python"


def test_a_pool_without_its_engine_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else find(name))
    with pytest.raises(ConfigError, match=r"vLLM is not installed .* pools\.other\.python") as refused:
        check_interpreters(config({"engine": "vllm"}, model=str(tmp_path)), processes=True)
    assert refused.value.path == "pools.other.engine"
    with pytest.raises(ConfigError, match="give a checkpoint") as refused:
        check_real(config({"engine": "vllm"}))
    assert refused.value.path == "pools.other.engine"


def test_an_evaluation_in_this_process_uses_an_engine_of_this_process(tmp_path: Path) -> None:
    trained = config({"engine": "vllm", "python": "/elsewhere/python", "slots": 3})
    pool = config_for(trained, tmp_path, "", 1).pools["other"]
    assert (pool.engine, pool.python, pool.slots) == ("torch", "", 3)


def test_an_evaluation_starts_no_trainer_ranks(tmp_path: Path) -> None:
    trained = config({}, trainer={"ranks": 16})
    assert config_for(trained, tmp_path, "", 1).trainer.ranks == 1


def test_a_run_trains_with_engines_in_another_interpreter(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'rollart[ray]'")
    small_task(tmp_path)
    python, notes = noting_python(tmp_path)
    words = ["train", "config.toml", "--json", "--out", "run", "--set", f"pools.local.python={python}"]
    done = subprocess.run([*COMMAND, *words], cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"]
    assert "did not close" not in done.stderr
    check_of_versions, *workers = notes.read_text().splitlines()
    assert check_of_versions == "-c"
    assert workers
    assert all(worker.endswith("default_worker.py") for worker in workers)
