"""`rollart init task`: what it writes works as it is."""

import subprocess
import sys
from pathlib import Path

import pytest
from real_cli import rollart

from rollart.app.task_template import write_task
from rollart.types.errors import RequestError


def test_a_new_task_passes_its_tests_and_the_check_and_trains(tmp_path: Path) -> None:
    done = rollart("init", "task", "word_game", cwd=tmp_path)
    assert done.code == 0, done.err
    folder = tmp_path / "word_game"
    files = {"README.md", "config.toml", "test_word_game.py", "word_game.py"}
    assert {path.name for path in folder.iterdir()} == files
    assert sorted(done.out.split()) == sorted(f"word_game/{name}" for name in files)
    tests = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert tests.returncode == 0, tests.stdout
    words = ("env", "check", "config.toml", "--script", "word_game.py:scripted", "--episodes", "4")
    checked = rollart(*words, cwd=folder)
    assert checked.code == 0, checked.out
    assert "word_game.py:WordGame: passed" in checked.out
    trained = rollart("train", "config.toml", "--runtime", "inline", "--set", "steps=2", "--out", "run", cwd=folder)
    assert trained.code == 0, trained.err
    assert "step 2/2" in trained.err


@pytest.mark.parametrize("name", ["Upper", "a-b", "class", "1st", "../up"])
def test_names_that_are_no_modules_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(RequestError, match="cannot be the name of a task"):
        write_task(name, tmp_path)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(RequestError, match="exists; name another task"):
        write_task("mine", tmp_path)


def test_a_task_does_not_hide_a_module_of_python(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="'random' is a module of Python"):
        write_task("random", tmp_path)
