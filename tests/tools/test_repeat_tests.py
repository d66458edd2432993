"""`make repeat`: orders that a seed gives again, and failures that are named with their seed."""

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "repeat_tests.py"
WRITES = """
import pytest

@pytest.fixture(scope="module")
def once():
    write("fixture")

def write(word):
    with open("order", "a") as file:
        file.write(f"{__name__} {word}\\n")

@pytest.mark.parametrize("number", range(6))
def test_in_some_order(once, number):
    write(number)
"""
FAILS = """
def test_good(): pass
def test_bad(): assert False, "a - b"
class TestGroup:
    def test_error(self, no_such_fixture): pass
"""


def repeat(folder: Path, *words: str) -> tuple[int, str]:
    command = [sys.executable, TOOL, *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=250, check=False)
    return done.returncode, done.stdout


def order(folder: Path) -> list[str]:
    written = folder / "order"
    lines = written.read_text().splitlines()
    written.unlink()
    return lines


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("test_a.py", "test_b.py"):
        (tmp_path / name).write_text(WRITES)
    (tmp_path / "bad.py").write_text(FAILS)
    return tmp_path


def test_each_round_has_an_order_of_its_own_that_its_seed_gives_again(folder: Path) -> None:
    code, output = repeat(folder, ".", "--times", "3", "--seed", "7", "--load")
    assert code == 0, output
    assert "3 of 3 rounds passed" in output
    lines = order(folder)
    rounds = [lines[start : start + 14] for start in (0, 14, 28)]
    assert len(lines) == 3 * 14, "fixtures of a module are made once"
    assert len({tuple(each) for each in rounds}) > 1
    assert sorted(rounds[0]) == sorted(rounds[1]) == sorted(rounds[2])
    repeat(folder, ".", "--times", "1", "--seed", "8")
    assert order(folder) == rounds[1]


def test_what_fails_is_named_with_its_seed(folder: Path) -> None:
    code, output = repeat(folder, "bad.py", "test_a.py", "--times", "2", "--seed", "3", "--", "-q")
    assert code == 1
    assert "0 of 2 rounds passed" in output
    assert "  2 × bad.py::test_bad (seeds 3, 4)\n" in output
    assert "  2 × bad.py::TestGroup::test_error (seeds 3, 4)\n" in output
    assert "test_good" not in output
    code, output = repeat(folder, "bad.py", "--times", "5", "--stop")
    assert (code, "0 of 1 rounds passed" in output) == (1, True)


def test_a_round_without_tests_is_no_success(folder: Path) -> None:
    code, output = repeat(folder, "test_a.py", "--times", "1", "--", "-k", "nothing_like_it")
    assert code == 1
    assert "pytest ended with 5" in output


def test_a_folder_that_is_not_there_is_refused(folder: Path) -> None:
    assert repeat(folder, "tests/nowhere") == (2, "no such tests: tests/nowhere\n")
