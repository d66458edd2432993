"""`tasks.NAME.python`: runs whose environments have an interpreter of their own."""

from pathlib import Path

import pytest
from other_python import other_python
from real_cli import rollart, small_task


@pytest.mark.parametrize("runtime", ["inline", pytest.param("ray", marks=pytest.mark.long)])
def test_a_run_trains(tmp_path: Path, runtime: str) -> None:
    small_task(tmp_path)
    python = other_python(tmp_path / "bare", packages=False)
    words = ("--runtime", runtime, "--out", "run", "--set", f"tasks.maze.python={python}")
    done = rollart("train", "config.toml", *words, cwd=tmp_path)
    assert done.code == 0, done.err
    assert "step 2/2" in done.err


def test_an_interpreter_that_is_not_there_is_refused_by_its_key(tmp_path: Path) -> None:
    small_task(tmp_path)
    done = rollart("train", "config.toml", "--runtime", "inline", "--set", "tasks.maze.python=nowhere", cwd=tmp_path)
    assert done.code == 2
    assert done.err.startswith("rollart: tasks.maze.python: node ")
    assert not (tmp_path / "runs").exists()
