"""Free repair: prompts, tools, models with formats of their own, scripted players, and a grader that agrees."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from sandbox_parts import own_sandboxes, public_folder, usable

from rollart.backends.environments.codec import ByteCodec
from rollart.backends.environments.sources import open_source
from rollart.backends.environments.tool_environment import ToolCalling
from rollart.config.tasks import TaskSettings
from rollart.ports.sandbox import Sandbox
from rollart.tasks.repair import bugs as known
from rollart.tasks.repair import grading
from rollart.tasks.repair.bugs import HELD_OUT, LEVELS, TRAINING, drawn, module
from rollart.tasks.repair.editing import EditRepair, report_of
from rollart.tasks.repair.grading import check_python, expected_line, grade
from rollart.tasks.repair.players import nothing, oracle, tinkerer
from rollart.tasks.repair.workplace import MAX_FILE_BYTES, spec_of
from rollart.tasks.sandboxes import shared_sandboxes
from rollart.tasks.scripts import Script, play
from rollart.types.chat import readable
from rollart.types.errors import EnvironmentFault, RequestError, SandboxUnavailable
from rollart.types.sandboxes import HOST_BASE
from rollart.types.trajectory import Prompt

MODULES = (*TRAINING, *HELD_OUT)
FIRST_HELD_OUT = 1_000_000


def prompt(seed: int, **data: bool) -> Prompt:
    return Prompt(str(seed), "repair", seed, data)


def episode(level: int = 2, **settings: object) -> ToolCalling:
    usable(shared_sandboxes())
    factory = f"{EditRepair.__module__}:{EditRepair.__name__}"
    task = TaskSettings(environment=factory, environment_settings={"level": level}, **settings)  # type: ignore[arg-type]
    built = open_source("repair", task, 1, ByteCodec()).build()
    assert isinstance(built, ToolCalling)
    return built


def score(script: Script, level: int, seeds: range) -> list[float]:
    return [play(episode(level), prompt(seed, held_out=True), script, max_turns=30).reward for seed in seeds]


# --- prompts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_prompts_draw_bugs_of_their_side_and_level(level: int) -> None:
    for side, names in ((False, TRAINING), (True, HELD_OUT)):
        found = [drawn(prompt(seed, held_out=side), level) for seed in range(300)]
        assert {bug.module for bug in found} == set(names)
        assert {bug.grade for bug in found} == set(LEVELS[level])
        assert len(set(found)) > 20
    assert drawn(prompt(5), level) == drawn(prompt(5), level)


def test_a_level_that_does_not_exist_is_refused() -> None:
    with pytest.raises(RequestError, match="levels are 2, 3"):
        EditRepair(level=1)


# --- an episode -----------------------------------------------------------------------------------------------------


def test_an_episode_of_reading_editing_and_testing() -> None:
    environment, bug = episode(), drawn(prompt(7), 2)
    first = readable(environment.reset(prompt(7)).observation)
    assert f"`{bug.module}.py` has a bug: {bug.symptom}." in first
    assert "edit_file" in first
    listed = readable(environment.step("list_files:").observation)
    assert [line.split()[0] for line in listed.splitlines()[1:]] == sorted(["check.py", f"{bug.module}.py"])
    source = readable(environment.step(f"read_file: {bug.module}.py").observation).partition("\n")[2]
    assert source == bug.edit.apply(module(bug.module).source)
    tested = readable(environment.step("run_tests:").observation)
    assert tested.splitlines()[1] == bug.symptom
    failing = len(set(bug.visible) & set(bug.failed))
    assert f"{len(bug.visible) - failing} of {len(bug.visible)} tests pass" in tested
    first_line = source.splitlines()[0]
    call = {"path": f"{bug.module}.py", "old": first_line, "new": f"{first_line}  # seen"}
    environment.step(f"edit_file: {json.dumps(call)}")
    changed = readable(environment.step(f"read_file: /app/{bug.module}.py").observation).partition("\n")[2]
    assert changed == source.replace(first_line, f"{first_line}  # seen", 1)
    last = environment.step("That is all.")
    environment.close()
    assert (last.reward, last.done, last.truncated) == (0.0, True, False)
    report = report_of(last.artifact)
    assert report["source"] == changed
    assert (report["module"], report["kind"]) == (bug.module, bug.kind)
    assert report["passed"] == len(module(bug.module).cases) - len(bug.failed)


def test_wrong_calls_are_explained() -> None:
    environment = episode()
    environment.reset(prompt(7))
    file = f"{drawn(prompt(7), 2).module}.py"
    for call, said in (
        ("read_file: nothing.py", "No such file"),
        ("edit_file: " + json.dumps({"path": file, "old": "return", "new": "raise"}), "it has to occur once"),
        ("edit_file: " + json.dumps({"path": file, "old": "no such text", "new": "x"}), "occurs 0 times"),
        ("edit_file: " + json.dumps({"path": file, "old": "", "new": "x" * (MAX_FILE_BYTES + 1)}), "are allowed"),
        ("edit_file: " + json.dumps({"path": ".", "old": "", "new": "x"}), "is not in /app"),
        ("edit_file: " + json.dumps({"path": "a\0b", "old": "", "new": "x"}), "Error:"),
        ("read_file: " + "x" * 5000, "Error:"),
        (f"edit_file: {file}", "write edit_file"),
    ):
        step = environment.step(call)
        assert said in readable(step.observation), (call, step)
        assert step.calls[0].error
    environment.close()


def test_an_agent_out_of_turns_is_graded() -> None:
    environment, given = episode(max_turns=1), prompt(7)
    first = readable(environment.reset(given).observation)
    last = environment.step(oracle([first], None))  # type: ignore[arg-type]
    environment.close()
    assert (last.reward, last.done, last.truncated) == (1.0, True, True)


def test_calls_of_a_model_with_a_format_of_its_own() -> None:
    environment = episode(tool_format="hermes")
    environment.reset(prompt(7))
    said = environment.step('<tool_call>{"name": "run_tests", "arguments": {}}</tool_call>')
    assert "tests pass" in readable(said.observation)
    environment.close()


def test_without_an_episode_there_are_no_tools() -> None:
    environment = EditRepair()
    with pytest.raises(EnvironmentFault, match="reset"):
        environment.run_tests()
    environment.close()


# --- players --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_the_oracle_earns_1_and_doing_nothing_0(level: int) -> None:
    seeds = range(FIRST_HELD_OUT, FIRST_HELD_OUT + 2)
    assert score(oracle, level, seeds) == [1.0, 1.0]
    assert score(nothing, level, seeds) == [0.0, 0.0]


def test_the_tinkerer_undoes_a_mutation() -> None:
    seed = next(seed for seed in range(1000) if drawn(prompt(seed, held_out=True), 2).function == "to_text")
    assert score(tinkerer, 2, range(seed, seed + 1)) == [1.0]


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("level", "expected"), [(2, 0.625), (3, 0.0)])
def test_the_tinkerer_has_its_known_score(level: int, expected: float) -> None:
    earned = score(tinkerer, level, range(FIRST_HELD_OUT, FIRST_HELD_OUT + 40))
    assert sum(earned) / len(earned) == pytest.approx(expected)


# --- the grader -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with public_folder() as folder, own_sandboxes(folder) as sandboxes:
        yield sandboxes.create(spec_of(HOST_BASE, Path("/nowhere")))


def check(sandbox: Sandbox, name: str, every: int) -> None:
    """The grader and the verification, which runs all cases in one process, find the same of modules and bugs."""
    right = module(name)
    assert grade(sandbox, name, right.source.encode(), right.cases).all_passed
    for bug in known.bugs(name)[::every]:
        found = grade(sandbox, name, bug.edit.apply(right.source).encode(), right.cases)
        assert tuple(number for number, passed in enumerate(found.passed) if not passed) == bug.failed, bug
        assert found.flags == ()


@pytest.mark.parametrize("name", ["cipher", "scores"])
def test_the_grader_finds_what_was_verified(name: str, sandbox: Sandbox) -> None:
    check(sandbox, name, 15)


@pytest.mark.long
@pytest.mark.parametrize("name", MODULES)
def test_the_grader_finds_all_that_was_verified(name: str, sandbox: Sandbox) -> None:
    check(sandbox, name, 1)


@pytest.mark.parametrize("name", MODULES)
def test_expected_values_are_plain_data(name: str) -> None:
    assert all(expected_line(case).endswith(b"\n") for case in module(name).cases)


def test_a_sandbox_without_python_is_refused(monkeypatch: pytest.MonkeyPatch, sandbox: Sandbox) -> None:
    check_python(sandbox)
    monkeypatch.setattr(grading, "PYTHON", ("python-that-is-not-there", "-c"))
    with pytest.raises(SandboxUnavailable, match="install it"):
        check_python(sandbox)
