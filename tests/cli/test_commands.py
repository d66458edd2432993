"""The commands as a user meets them: what is on stdout, what is on stderr, and the exit code."""

import asyncio
import json
import sqlite3
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rollart import __version__
from rollart.app.run_folder import CONFIG_DRAFT, held, write_config
from rollart.app.running import _audited, _state, free_folder
from rollart.cli.main import main
from rollart.cli.train import config_file
from rollart.config.load import check, load_toml
from rollart.config.modes import Mode
from rollart.config.schema import RunConfig
from rollart.observe.journal import SqliteJournal
from rollart.observe.pruning import SCHEMA
from rollart.policy.staleness import StalenessBound
from rollart.types.failures import StopReason
from rollart.types.ids import GroupId, PromptId
from rollart.types.journal import GroupOpened, RunEnded, RunStarted, Snapshot, StallReported
from rollart.types.snapshot import RunState
from rollart.types.trajectory import Purpose

SMALL = (
    "--set", "steps=2",
    "--set", "batch.trajectories=16",
    "--set", "batch.group_size=4",
    "--set", "tasks.frozenlake.environments=16",
    "--set", "tasks.math.environments=16",
)  # fmt: skip
UNSOLVABLE = (
    "--set", "sim.tasks.math.reset_failure=1.0",
    "--set", "tasks.math.share_deadline_s=30.0",
    "--set", "tasks.math.unfilled=stop",
)  # fmt: skip


class Done(NamedTuple):
    code: int
    out: str
    err: str


class Command:
    """`rollart` in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def __call__(self, *words: str | Path) -> Done:
        self._monkeypatch.setattr(sys, "argv", ["rollart", *map(str, words)])
        self._capsys.readouterr()
        code: Any = 0
        try:
            main()
        except SystemExit as exit_:
            code = exit_.code or 0
        out, err = self._capsys.readouterr()
        return Done(code, out, err)


@pytest.fixture
def rollart(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    monkeypatch.chdir(tmp_path)
    return Command(monkeypatch, capsys)


def in_a_process(*words: str | Path, cwd: Path) -> Done:
    command = [sys.executable, "-m", "rollart", *map(str, words)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=250, check=False)
    return Done(done.returncode, done.stdout, done.stderr)


def one_object(out: str) -> dict[str, Any]:
    assert out.count("\n") == 1, "one line, and nothing else"
    assert out.endswith("}\n")
    parsed = json.loads(out)
    assert isinstance(parsed, dict)
    return parsed


def refused(done: Done, *words: str) -> None:
    """Exit code 2, nothing on stdout, and on stderr what was wrong; never a traceback."""
    assert done.code == 2
    assert done.out == ""
    assert "Traceback" not in done.err
    for word in words:
        assert word in done.err


# --- sim ------------------------------------------------------------------------------------------------------------


def test_the_version_is_one_line(rollart: Command) -> None:
    assert rollart("--version") == Done(0, f"rollart {__version__}\n", "")


def test_sim_prints_one_json_object(tmp_path: Path) -> None:
    done = in_a_process("sim", "laptop", "--json", *SMALL, cwd=tmp_path)
    assert (done.code, done.err) == (0, "")
    report = one_object(done.out)
    assert {
        "step_s", "trajectories_per_s", "wasted_token_share", "pools", "staleness", "lag", "outcomes", "wasted_tokens",
        "digest",
    } <= set(report)  # fmt: skip
    assert report["mode"] == "rollart"
    assert report["steps"] == 2
    assert report["step_s"] > 0
    assert 0 <= report["wasted_token_share"] < 1
    assert {"fast", "wide", "trainer", "reward", "environments"} <= set(report["pools"])
    assert sum(report["staleness"].values()) == sum(report["lag"].values()) == 2 * 16 / 4
    assert report["outcomes"]["completed"] >= 32
    assert len(report["digest"]) == 32
    assert list(tmp_path.iterdir()) == [], "a simulation leaves nothing behind"


def test_sim_is_a_function_of_its_seed(rollart: Command) -> None:
    digests = [
        one_object(rollart("sim", "laptop", "--json", "--seed", seed, *SMALL).out)["digest"] for seed in ("1", "1", "2")
    ]
    assert digests[0] == digests[1] != digests[2]


def test_sim_shows_a_report(rollart: Command) -> None:
    done = rollart("sim", "laptop", *SMALL)
    assert done.code == 0
    for word in ("laptop", "rollart", "2 steps", "trajectories/s", "fast", "wide", "trainer"):
        assert word in done.out


def test_a_report_shows_what_was_filtered(rollart: Command) -> None:
    done = rollart("sim", "laptop", "--set", "algorithm.filter_zero_variance=true", *SMALL)
    assert done.code == 0
    for word in ("groups filtered", "no signal: all rewards are equal (", "per member"):
        assert word in done.out
    assert "groups filtered" not in rollart("sim", "laptop", *SMALL).out


def test_sim_compares_all_modes(rollart: Command, tmp_path: Path) -> None:
    svg = tmp_path / "modes.svg"
    done = rollart("sim", "laptop", "--mode", "all", "--svg", svg, *SMALL)
    assert done.code == 0
    heading = next(line for line in done.out.splitlines() if "per step" in line)
    assert heading.split()[2:] == [mode.value for mode in Mode], "a column for each mode"
    for before, after in zip(list(Mode), list(Mode)[1:], strict=False):
        assert f"{before.value} → {after.value}:" in done.out, "and what makes the difference to the next"
    assert "engines busy" in done.out

    root = ElementTree.parse(svg).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {mode.value for mode in Mode} <= set(texts)


def test_sim_gives_all_modes_as_one_object(rollart: Command) -> None:
    report = one_object(rollart("sim", "laptop", "--mode", "all", "--json", *SMALL).out)
    assert list(report["modes"]) == [mode.value for mode in Mode]
    single = one_object(rollart("sim", "laptop", "--mode", "areal", "--json", *SMALL).out)
    assert report["modes"]["areal"] == single


def test_a_run_that_fails_exits_with_1(rollart: Command) -> None:
    done = rollart("sim", "laptop", "--json", *SMALL, *UNSOLVABLE)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("rollart: ShareUnfilled: ")
    assert "math" in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sim", "laptop", "--mode", "rolart"], "did you mean rollart?"),
        (["sim", "laptob"], "did you mean laptop?"),
        (["sim", "laptop", "--set", "alpa=1"], "did you mean alpha?"),
        (["sim", "laptop", "--set", "batch.group_sise=4"], "did you mean group_size?"),
        (["sim", "laptop", "--set", "sim.engine.slot=4"], "did you mean slots?"),
        (["sim", "laptop", "--set", "mode=areel"], "did you mean areal?"),
        (["fuzz", "--mode", "synk"], "did you mean sync?"),
        (["train", "--set", "stepps=4"], "did you mean steps?"),
    ],
)
def test_a_typo_is_refused_with_a_suggestion(rollart: Command, words: list[str], message: str, tmp_path: Path) -> None:
    refused(rollart(*words), message)
    assert list(tmp_path.iterdir()) == [], "nothing was started"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sim", "--mod", "sync"], "--mode"),
        (["simm"], "sim"),
        (["sim", "--seed", "x"], "--seed"),
        (["sim", "laptop", "--set", "steps=0"], "steps"),
        (["sim", "laptop", "--set", "steps"], "key=value"),
        (["sim", "laptop", "--set", "batch.trajectories=17"], "batch"),
        (["fuzz", "--seeds", "0"], "--seeds"),
        (["fuzz", "--trace", "t.jsonl"], "--seed"),
        (["fuzz", "--seed", "3", "--trace", "no-folder/t.jsonl"], "no-folder/t.jsonl"),
        (["sim", "laptop", "--mode", "all", "--svg", "no-folder/a.svg"], "no-folder/a.svg"),
        (["sim", "laptop", "--mode", "all", "--svg", "."], "--svg"),
        (["audit", "nothing-here"], "no journal"),
        (["audit", "."], "no journal"),
        (["train", "no-such-file.toml"], "no such config file"),
        (["train", "quikstart"], "did you mean quickstart?"),
        (["train", "--resume", ".", "--out", "x"], "--resume"),
    ],
)
def test_a_wrong_request_exits_with_2(rollart: Command, words: list[str], message: str, tmp_path: Path) -> None:
    refused(rollart(*words), message)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["sim", "fuzz", "audit", "train"])
def test_every_command_has_help_with_an_example(rollart: Command, command: str) -> None:
    done = rollart(command, "--help")
    assert (done.code, done.err) == (0, "")
    assert f"Example: rollart {command}" in done.out


# --- fuzz and audit -------------------------------------------------------------------------------------------------


def test_fuzz_prints_one_json_object(tmp_path: Path) -> None:
    done = in_a_process("fuzz", "--seeds", "5", "--json", cwd=tmp_path)
    assert (done.code, done.err) == (0, "")
    summary = one_object(done.out)
    assert {"seeds", "violations", "seconds", "faults", "modes", "steps", "trajectories"} <= set(summary)
    assert (summary["seeds"], summary["violations"]) == (5, 0)
    assert summary["modes"] == {mode.value: 1 for mode in Mode}
    assert set(summary["faults"]) == {str(row) for row in (*range(1, 25), 33)}
    assert summary["steps"] >= 5 * 3
    assert summary["trajectories"] >= 5 * 50


def test_fuzz_is_the_same_on_any_number_of_processes(tmp_path: Path) -> None:
    summaries = [
        one_object(in_a_process("fuzz", "--from", "5", "--seeds", "3", "--jobs", jobs, "--json", cwd=tmp_path).out)
        for jobs in ("1", "2")
    ]
    assert [summary | {"seconds": 0} for summary in summaries[:1]] == [summaries[1] | {"seconds": 0}]


def test_fuzz_of_one_mode(rollart: Command) -> None:
    summary = one_object(rollart("fuzz", "--seeds", "2", "--jobs", "1", "--mode", "areal", "--json").out)
    assert summary["modes"] == {"areal": 2}


def test_a_violation_exits_with_1_and_says_how_to_replay_it(rollart: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StalenessBound, "violated", lambda *_: False)
    seen = rollart("fuzz", "--seeds", "20", "--jobs", "1", "--mode", "rollart", "--json")
    assert seen.code == 1
    summary = one_object(seen.out)
    seed = summary["failed_seeds"][0]
    assert summary["violations"] == len(summary["failed_seeds"])
    replay = f"rollart fuzz --seed {seed} --mode rollart --trace journal.jsonl"
    assert replay in seen.err

    monkeypatch.setattr("rollart.cli.fuzz.shrink", lambda world, _fails: world)
    again = rollart(*replay.split()[1:], "--json")
    assert again.code == 1
    assert one_object(again.out)["violations"]
    assert "smallest world" in again.err
    audited = rollart("audit", "journal.jsonl", "--json")
    assert audited.code == 1
    assert {found["rule"] for found in one_object(audited.out)["violations"]} == {2}


@pytest.fixture
def trace(rollart: Command, tmp_path: Path) -> Path:
    """The journal of a world, as JSON lines."""
    path = tmp_path / "trace.jsonl"
    done = rollart("fuzz", "--seed", "3", "--trace", path, "--json")
    assert done.code == 0
    assert one_object(done.out)["violations"] == []
    return path


def test_a_trace_is_audited(rollart: Command, trace: Path) -> None:
    done = rollart("audit", trace)
    assert done.code == 0
    assert "0 violations" in done.out
    body = one_object(rollart("audit", trace, "--json").out)
    assert body["violations"] == []
    assert body["events"] == len(trace.read_text().splitlines()) - 1, "the first line names the format"
    assert sum(body["outcomes"].values()) > 50


@pytest.mark.parametrize(
    "kind",
    [
        "RunStarted",
        "EpochStarted",
        "PromptTaken",
        "GroupOpened",
        "TrajectoryStarted",
        "Placed",
        "TurnEnded",
        "RewardArrived",
        "TrajectoryEnded",
        "GroupEnded",
        "BatchClaimed",
        "StepTrained",
    ],
)
def test_a_trace_that_lacks_a_line_is_found_out(rollart: Command, trace: Path, kind: str) -> None:
    lines = trace.read_text().splitlines(keepends=True)
    number = next(number for number, line in enumerate(lines) if json.loads(line).get("type") == kind)
    cut = trace.with_name("cut.jsonl")
    cut.write_text("".join(lines[:number] + lines[number + 1 :]))
    done = rollart("audit", cut)
    assert done.code == 1
    assert ", 0 violations" not in done.out
    assert "violations" in done.out
    body = one_object(rollart("audit", cut, "--json").out)
    assert body["violations"]
    assert body["events"] == len(lines) - 2


def test_a_run_that_did_not_end_is_said_to_be_open(rollart: Command, trace: Path) -> None:
    lines = trace.read_text().splitlines(keepends=True)
    started = next(number for number, line in enumerate(lines) if json.loads(line).get("type") == "TrajectoryStarted")
    cut = trace.with_name("cut.jsonl")
    cut.write_text("".join(lines[: started + 1]))
    done = rollart("audit", cut)
    assert done.code == 0
    assert "the run did not end: 1 trajectories open" in done.out
    body = one_object(rollart("audit", cut, "--json").out)
    assert (body["ended"], body["stop"], body["open_trajectories"]) == ("", None, 1)
    cut.write_text("".join(lines[:-1]))
    assert "the run did not end: 0 trajectories open" in rollart("audit", cut).out
    assert "did not end" not in rollart("audit", trace).out


def test_a_journal_without_events_is_refused(rollart: Command, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    refused(rollart("audit", "empty.jsonl"), "empty.jsonl", "not a journal")


def test_a_pruned_journal_is_audited_as_a_whole(rollart: Command, tmp_path: Path) -> None:
    async def run() -> None:
        journal = SqliteJournal(tmp_path / "journal.sqlite", 100_000)
        journal.append(RunStarted(0.0, "long", "rollart", 0, 0, {}, 1))
        for number in range(2000):
            journal.append(StallReported(float(number), (f"{number:1000}",) if number != 7 else ()))
            if number % 100 == 99:
                journal.append(Snapshot(float(number), RunState()))
                await journal.flush()
        await journal.close()

    asyncio.run(run())
    done = rollart("audit", tmp_path)
    assert done.code == 1
    assert "rule 6, event 8: nothing moved and nothing was waited for" in done.out
    assert "2,021 events (" in done.out
    body = one_object(rollart("audit", tmp_path, "--json").out)
    assert (body["events"], len(body["violations"])) == (2021, 1)
    assert body["pruned"] > 1000


def test_what_is_no_journal_is_refused(rollart: Command, tmp_path: Path) -> None:
    for name in ("garbage.jsonl", "garbage.sqlite"):
        (tmp_path / name).write_text("garbage\n")
        refused(rollart("audit", name), name, "not a journal")


# --- train ----------------------------------------------------------------------------------------------------------


def test_train_does_not_write_over_a_folder(rollart: Command, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "notes.txt").write_text("keep me")
    refused(rollart("train", "--out", folder), "mine", "not an empty folder")
    refused(rollart("train", "--out", folder / "notes.txt"), "notes.txt")
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    assert (folder / "notes.txt").read_text() == "keep me"


def test_train_resumes_a_run_only(rollart: Command, tmp_path: Path) -> None:
    refused(rollart("train", "--resume", "nowhere"), "nowhere", "folder of a run")
    (tmp_path / "empty").mkdir()
    refused(rollart("train", "--resume", "empty"), "empty", "folder of a run")
    assert list((tmp_path / "empty").iterdir()) == []


def test_a_run_that_goes_on_keeps_its_advantage(rollart: Command, tmp_path: Path) -> None:
    """The checkpoint has what the advantage needs, and nothing for another one."""
    run = RunConfig.model_validate({"tasks": {"lake": {}}, "pools": {"local": {}}})
    (tmp_path / "config.json").write_text(run.model_dump_json())
    change = ("--set", "algorithm.advantage=gae")
    refused(rollart("train", "--resume", tmp_path, *change), "algorithm.advantage", "start a new run")
    lora = ("--set", "trainer.lora={rank=2}")
    refused(rollart("train", "--resume", tmp_path, *lora), "trainer.lora", "start a new run")


def test_a_damaged_run_folder_is_refused(rollart: Command, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    refused(rollart("train", "--resume", tmp_path), "config.json")


def test_a_folder_with_nothing_but_half_a_config_is_still_empty(tmp_path: Path) -> None:
    """All that is left of a run that was killed while it wrote its config."""
    (tmp_path / CONFIG_DRAFT).write_text('{"steps"')
    config = check(RunConfig, load_toml(config_file("frozenlake")))
    assert free_folder(tmp_path, config.name, config) == tmp_path
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_runs_that_start_together_have_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first number is taken between the look and the making; so it is for a link to nowhere."""
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    Path("runs/frozenlake-1").symlink_to("nowhere")
    config = check(RunConfig, load_toml(config_file("frozenlake")))
    assert free_folder(None, config.name, config) == Path("runs/frozenlake-2")


def test_a_dry_run_is_not_json(rollart: Command) -> None:
    refused(rollart("train", "frozenlake", "--dry-run", "--json"), "omit --json")


def test_a_run_whose_journal_breaks_a_rule_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = [
        RunStarted(0.0, "run", "rollart", 1, 0, {"maze": 1}, 1),
        GroupOpened(1.0, GroupId(1), "maze", PromptId("p"), Purpose.TRAIN, 0, 0),
        RunEnded(2.0, 0, "", StopReason.DONE),
    ]

    async def write() -> None:
        journal = SqliteJournal(tmp_path / "journal.sqlite", 10**9)
        for event in events:
            journal.append(event)
        await journal.close()

    asyncio.run(write())
    assert _audited(tmp_path).ended == "done"
    assert f"See: rollart audit {tmp_path}" in capsys.readouterr().err


def test_a_run_that_is_going_on_is_not_resumed(rollart: Command, tmp_path: Path) -> None:
    preset = check(RunConfig, load_toml(config_file("frozenlake")))
    write_config(tmp_path, preset.model_dump_json())
    before = (tmp_path / "config.json").read_text()
    with held(tmp_path):
        refused(rollart("train", "--resume", tmp_path, "--set", "steps=77"), "still active", "then resume")
        assert (tmp_path / "config.json").read_text() == before
        assert not (tmp_path / "devices.json").exists()
        assert rollart("train", "--resume", tmp_path, "--dry-run").code == 0
    with held(tmp_path):
        pass


@pytest.mark.parametrize("left", ["no journal", "a journal without tables", "a journal without events"])
def test_a_run_that_was_killed_before_its_first_event_starts(left: str, tmp_path: Path) -> None:
    journal = tmp_path / "journal.sqlite"
    if left != "no journal":
        with closing(sqlite3.connect(journal)) as db:
            db.execute("PRAGMA journal_mode=WAL")
            if left == "a journal without events":
                db.executescript(SCHEMA)
    assert _state(journal) is None


@pytest.mark.parametrize("words", [["config.toml"], ["--set", "stepps=4"]])
def test_a_config_is_refused_before_torch_is_imported(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("stepps = 4\n[batch]\ntrajectories = 4\ngroup_size = 2\n[tasks.frozenlake]\n")
    code = (
        "import sys\nfrom rollart.cli.main import main\n"
        "try:\n    main()\n"
        "finally:\n    print(sorted({'torch', 'transformers', 'gymnasium', 'ray'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, "train", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 2
    assert "stepps: unknown key (did you mean steps?)" in done.stderr
    assert done.stdout == "[]\n"
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]


def test_a_dry_run_shows_config_and_placement_and_starts_nothing(rollart: Command, tmp_path: Path) -> None:
    done = rollart("train", "frozenlake", "--dry-run", "--set", "steps=7", "--set", "pools.fast.engines=2")
    assert done.code == 0, done.err
    assert '"steps": 7' in done.out
    assert "2 engine" in done.out
    assert "turns on local or fast (auto)" in done.out
    assert not list(tmp_path.iterdir())
