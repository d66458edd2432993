"""`rollart bench all`: one table of what benches gave, with benches that are scripts of the test."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from rollart.bench import suite as bench_all
from rollart.bench.commands import app
from rollart.bench.suite import BENCHES, YES, BenchSpec, Figure, Target, commit_of_sources, this_machine
from rollart.cli.main import main

FAKE = """
import json, sys
from pathlib import Path

words = sys.argv[1:]
assert words[0] == "bench" and words[-1] == "--json", words
answer = json.loads(Path(__file__).with_name(f"{words[1]}.json").read_text())
Path(__file__).with_name("called").open("a").write(" ".join(words[1:-1]) + "\\n")
sys.stderr.write(answer["err"])
sys.stdout.write(answer["out"])
sys.exit(answer["code"])
"""
TWO = {
    "quick": BenchSpec(
        ("quick", "--python", "{trl}", "--picture", "{folder}/quick.svg"),
        (
            Figure("part.rate", Target(low=5)),
            Figure("late", Target(high=0.5)),
            Figure("same", YES),
            Figure("plain"),
            Figure("other.rate", Target(low=2), absent="other is not installed"),
        ),
    ),
    "slow": BenchSpec(("slow",), (Figure("points", Target(-5, 5)),)),
}
QUICK: dict[str, Any] = {"part": {"rate": 5.25}, "late": 0.75, "same": True, "plain": 1234.5}


class World:
    """Benchmarks with results given by the test."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.monkeypatch = monkeypatch
        (folder / "fake.py").write_text(FAKE)
        (folder / "docs").mkdir()
        self.table = folder / "docs" / "benchmarks.md"
        monkeypatch.setattr(bench_all, "ROLLART", (sys.executable, str(folder / "fake.py")))
        monkeypatch.setattr(bench_all, "BENCHES", TWO)
        self.answers("quick", QUICK)
        self.answers("slow", {"points": 3.0})

    def answers(self, name: str, result: Any, *, err: str = "", code: int = 0) -> None:
        out = result if isinstance(result, str) else json.dumps(result)
        (self.folder / f"{name}.json").write_text(json.dumps({"out": out, "err": err, "code": code}))

    def run(self, *options: object) -> object:
        words = ["rollart", "bench", "all", "--out", str(self.table), *map(str, options)]
        self.monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code or 0

    def rows(self) -> list[list[str]]:
        lines = [line for line in self.table.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
        return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]

    def called(self) -> list[str]:
        return (self.folder / "called").read_text().splitlines()


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


def test_every_bench_that_there_is_has_a_place_in_the_table() -> None:
    group = typer.main.get_command(app)
    assert {bench.arguments[0] for bench in BENCHES.values()} == set(group.commands) - {"all"}  # type: ignore[attr-defined]
    for bench in BENCHES.values():
        options = {name for each in group.commands[bench.arguments[0]].params for name in each.opts}  # type: ignore[attr-defined]
        assert {word for word in bench.arguments if word.startswith("--")} | {"--json"} <= options


def test_a_table_of_what_was_measured_with_what_was_asked(world: World) -> None:
    assert world.run("--trl", "/opt/trl/python") == 0
    assert world.called() == [f"quick --python /opt/trl/python --picture {world.folder}/docs/quick.svg", "slow"]
    rows = world.rows()
    assert [row[:5] for row in rows] == [
        ["quick", "`part.rate`", "5.25", "≥ 5", "yes"],
        ["", "`late`", "0.75", "≤ 0.5", "**no**"],
        ["", "`same`", "yes", "yes", "yes"],
        ["", "`plain`", "1,234", "", ""],
        ["", "`other.rate`", "not run: other is not installed", "≥ 2", ""],
        ["slow", "`points`", "3", "-5 to 5", "yes"],
    ]
    assert [bool(row[5] and row[6] and row[7]) for row in rows] == [True, False, False, False, False, True]
    assert f"Measured on: {this_machine()}." in world.table.read_text(encoding="utf-8")
    assert json.loads(world.table.with_suffix(".json").read_bytes())["quick"]["result"] == QUICK


def test_one_bench_again_and_the_rest_as_it_was(world: World) -> None:
    world.monkeypatch.setattr(bench_all, "commit_of_sources", lambda: "aaaaaaa")
    world.monkeypatch.setattr(bench_all, "this_machine", lambda: "an old machine")
    assert world.run() == 0
    world.monkeypatch.setattr(bench_all, "commit_of_sources", lambda: "bbbbbbb+")
    world.monkeypatch.setattr(bench_all, "this_machine", lambda: "a new machine")
    world.answers("slow", {"points": -7.5})
    world.answers("quick", "not asked", code=1)
    assert world.run("--only", "slow") == 0
    rows = world.rows()
    assert [rows[0][2], rows[0][6]] == ["5.25", "aaaaaaa"]
    assert [*rows[-1][:5], rows[-1][6]] == ["slow", "`points`", "-7.5", "-5 to 5", "**no**", "bbbbbbb+"]
    text = world.table.read_text(encoding="utf-8")
    assert "- quick: an old machine\n- slow: a new machine\n" in text


def test_what_cannot_run_here_says_why_and_is_no_failure(world: World) -> None:
    world.answers("quick", "", err="quick ...\nrollart: /opt/python has no TRL; install it\n", code=2)
    assert world.run() == 0
    first, second = world.rows()
    assert first[:5] == ["quick", "", "not run: /opt/python has no TRL; install it", "", ""]
    assert second[2] == "3"


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ({"result": "", "err": "rollart: RunError: a | b\n\n", "code": 1}, "exit code 1: RunError: a \\| b"),
        ({"result": "", "err": "Error: No such option\n", "code": 2}, "exit code 2: Error: No such option"),
        ({"result": "gone"}, "unexpected output: Expecting value"),
        ({"result": {"part": 1.0}}, "unexpected output: part.rate is missing"),
    ],
)
def test_what_fails_is_in_the_table_and_in_the_exit_code(
    world: World, answer: dict[str, Any], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    world.answers("quick", **answer)
    assert world.run() == 1
    failed, other = world.table.read_text(encoding="utf-8").splitlines()[-2:]
    assert failed.startswith(f"| quick |  | failed: {why}")
    assert "| **no** |" in failed
    assert other.startswith("| slow | `points` | 3 |"), "the others are measured all the same"
    err = capsys.readouterr().err
    assert answer.get("err", "") in err, "its progress is ours"
    assert "quick failed" in err
    assert world.run("--only", "slow") == 0, "nothing that was run now failed"


@pytest.mark.parametrize("options", [("--only", "slwo"), ("--out", "/nowhere/at/all.md")])
def test_what_is_refused(world: World, options: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert world.run(*options) == 2
    assert not world.table.exists()
    assert ("did you mean slow" in capsys.readouterr().err) == (options[0] == "--only")


def test_damaged_results_are_not_thrown_away(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    kept = world.table.with_suffix(".json")
    kept.write_text("{")
    assert world.run("--only", "slow") == 2
    assert "is damaged" in capsys.readouterr().err
    assert kept.read_text() == "{"


@pytest.mark.parametrize(
    ("asked", "within", "beyond", "text"),
    [
        (Target(low=2), 2.0, 1.99, "≥ 2"),
        (Target(high=0.5), 0.5, 0.51, "≤ 0.5"),
        (Target(-5, 5), -5.0, 5.1, "-5 to 5"),
        (Target(0, 0), 0, 1, "0"),
        (YES, True, False, "1"),
    ],
)
def test_what_is_asked(asked: Target, within: float, beyond: float, text: str) -> None:
    assert asked.met(within)
    assert not asked.met(beyond)
    assert str(asked) == text


def test_the_machine_and_the_commit() -> None:
    machine = this_machine()
    assert f"Python {sys.version.split()[0]}" in machine
    assert " cores, " in machine
    assert " GiB, " in machine
    assert commit_of_sources().rstrip("+").isalnum()
