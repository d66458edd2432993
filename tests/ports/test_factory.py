"""Factory paths: modules and files, and the errors for paths that lead nowhere."""

import threading
from pathlib import Path

import pytest

from rollart.ports.factory import file_being_loaded, load
from rollart.types.errors import RequestError

SCRIPT = """
import sys
from pathlib import Path
from neighbour_of_the_script import WORD

with (Path(__file__).parent / "runs").open("a") as runs:
    runs.write(__name__ + "\\n")


class Maze:
    class Small:
        pass

    word = WORD


if __name__ == "__main__":
    sys.exit("not when it is loaded")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "neighbour_of_the_script.py").write_text("WORD = 'left'\n")
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def test_a_file_is_run_once_and_not_as_the_main_module(script: Path) -> None:
    found = []
    threads = [threading.Thread(target=lambda: found.append(load(f"{script}:Maze"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(found) == 8
    assert len(set(map(id, found))) == 1
    assert found[0].word == "left"  # type: ignore[attr-defined]
    assert load(f"{script}:Maze.Small") is found[0].Small  # type: ignore[attr-defined]
    assert (script.parent / "runs").read_text() == f"{script}\n"
    assert file_being_loaded() is None


def test_a_relative_file_is_found(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(script.parent)
    assert load("script.py:Maze") is load(f"{script}:Maze")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def broken(:", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("import no_such_module_anywhere", "no_such_module_anywhere"),
        ("class Maize: pass", "did you mean Maize?"),
        ("Maze = 3", "is a int, which cannot be called"),
    ],
)
def test_a_file_that_does_not_have_it_says_why(tmp_path: Path, body: str, message: str) -> None:
    path = tmp_path / "script.py"
    path.write_text(body + "\n")
    with pytest.raises(RequestError) as caught:
        load(f"{path}:Maze")
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    # A file that is mended is loaded.
    if "Error" in message or "no_such" in message:
        path.write_text("class Maze: pass\n")
        assert load(f"{path}:Maze")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nothing", "package.module:callable"),
        (":x", "package.module:callable"),
        ("no/such/file.py:Maze", "there is no file"),
        ("no.such.module:Maze", "cannot import"),
        ("rollart.tasks.frozenlake:FrozenLak", "did you mean FrozenLake?"),
        ("math:pi", "cannot be called"),
    ],
)
def test_what_leads_nowhere_is_refused(path: str, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        load(path)
    assert message in str(caught.value)


def test_a_module_that_fails_is_not_taken_for_a_bug_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fails_to_import.py").write_text("{}['x']\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RequestError, match="KeyError: 'x'"):
        load("fails_to_import:Maze")
