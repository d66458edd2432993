"""Repair: modules, mutations, verified bugs, candidates to choose from, and task folders."""

import ast
import json
import os
import subprocess
import tomllib
from collections import Counter

import pytest

from rollart.tasks.repair import generate
from rollart.tasks.repair.bugs import HELD_OUT, TRAINING, bugs, drawn, module, record_of
from rollart.tasks.repair.choose import LETTERS, PASSES, RULES, ChooseRepair, shown
from rollart.tasks.repair.edits import GRADES, Edit, Kind, mutations
from rollart.tasks.repair.runner import TIMEOUT
from rollart.tasks.repair.verify import failed, results, verified_bugs
from rollart.types.errors import EnvironmentFault, RequestError
from rollart.types.trajectory import Prompt

MODULES = (*TRAINING, *HELD_OUT)


def prompt(seed, **data):
    return Prompt(str(seed), "repair", seed, data)


# --- modules and mutations ------------------------------------------------------------------------------------------


def test_modules_are_enough_and_apart():
    assert len(MODULES) == len(set(MODULES)) >= 12
    assert not set(TRAINING) & set(HELD_OUT)
    sources = [module(name).source for name in MODULES]
    assert all(30 <= len(source.splitlines()) <= 80 for source in sources)
    functions = [
        node.name for source in sources for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)
    ]
    assert len(functions) > 80


@pytest.mark.parametrize("name", MODULES)
def test_every_function_has_tests(name):
    known = module(name)
    called = {
        node.id for case in known.cases for node in ast.walk(ast.parse(case.expression)) if isinstance(node, ast.Name)
    }
    functions = {node.name for node in ast.parse(known.source).body if isinstance(node, ast.FunctionDef)}
    assert functions <= called


SOURCE = '''\
def f(a, b):
    """Text."""
    total = 0
    if a < b and not b:
        total += max(a, 1)
    else:
        total = g(a, b)
    return total
'''


def lines_of(kind):
    return {edit.new for found, _, edit in mutations(SOURCE) if found is kind}


def test_mutations_are_edits_of_lines():
    assert lines_of(Kind.COMPARISON) == {("    if a <= b and not b:",), ("    if a > b and not b:",)}
    assert lines_of(Kind.OPERATOR) == {("        total -= max(a, 1)",)}
    assert lines_of(Kind.CONSTANT) == {
        ("    total = 1",), ("    total = -1",), ("        total += max(a, 2)",), ("        total += max(a, 0)",)
    }  # fmt: skip
    assert lines_of(Kind.LOGIC) == {("    if a < b or not b:",), ("    if a < b and b:",)}
    assert {("        total += min(a, 1)",), ("        total = g(b, a)",)} <= lines_of(Kind.CALL)
    assert ("    if b < b and not b:",) in lines_of(Kind.VARIABLE)
    assert lines_of(Kind.BRANCH) == {()}
    for _, function, edit in mutations(SOURCE):
        assert function == "f"
        broken = edit.apply(SOURCE)
        ast.parse(broken)
        assert broken != SOURCE
        assert edit.inverse().apply(broken) == SOURCE


def test_an_edit_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="line 2"):
        Edit(2, ("x",), ("y",)).apply("a\nb\n")


# --- verified bugs --------------------------------------------------------------------------------------------------


def test_there_are_hundreds_of_bugs_of_all_grades():
    found = {name: bugs(name) for name in MODULES}
    assert all(len(each) >= 20 for each in found.values())
    assert sum(map(len, found.values())) >= 400
    assert sum(len(found[name]) for name in HELD_OUT) >= 100
    grades = Counter(bug.grade for each in found.values() for bug in each)
    assert min(grades[grade] for grade in set(GRADES.values())) >= 40
    assert {bug.kind for each in found.values() for bug in each} == set(Kind)


def check(name, chosen):
    """Run what `verified.json` says about some bugs of a module."""
    known = module(name)
    sources = [known.source]
    for bug in chosen:
        broken = bug.edit.apply(known.source)
        sources += [broken, *(candidate.edit.apply(broken) for candidate in bug.candidates)]
    ran = iter(results(known.cases, sources))
    assert failed(next(ran)) == (), "the module as it is passes all of its tests"
    for bug in chosen:
        given = next(ran)
        assert bug.failed == failed(given)
        assert bug.failed
        assert bug.gave == given[bug.failed[0]]
        assert TIMEOUT not in given
        assert not bug.candidates[0].failed
        assert [candidate.failed for candidate in bug.candidates] == [failed(next(ran)) for _ in bug.candidates]
        assert all(candidate.failed for candidate in bug.candidates[1:]), "one candidate alone is right"
        assert len({candidate.edit for candidate in bug.candidates}) == len(bug.candidates) == len(LETTERS)


@pytest.mark.parametrize("name", MODULES)
def test_bugs_fail_the_tests_that_the_file_says(name):
    check(name, bugs(name)[::6])


@pytest.mark.long
@pytest.mark.parametrize("name", MODULES)
def test_the_file_is_what_verification_finds(name):
    """Run `python -m rollart.tasks.repair.verify` after a change of a module, its tests or the mutations."""
    check(name, bugs(name))
    assert [record_of(bug) for bug in verified_bugs(name)] == [record_of(bug) for bug in bugs(name)]


def test_code_under_test_is_limited():
    cases = [("f(3)", "3", ""), ("f(4)", "4", ""), ("f(5)", "", "ValueError")]
    ran = results(
        cases,
        [
            "def f(x): return x",
            "def f(x):\n    while x != 3: pass\n    return x",
            "def f(x): raise ValueError",
            "def f(x): return float(x)",
            "def f(x): return [0] * (10 ** 10)",
            "def f(x) return x",
            "def f(x):\n    try:\n        while True: pass\n    except Exception:\n        return x",
        ],
    )
    assert ran == [
        (None, None, "5"),
        (None, TIMEOUT, TIMEOUT),
        ("ValueError", "ValueError", None),
        ("3.0", "4.0", "5.0"),
        ("MemoryError",) * 3,
        ("SyntaxError",) * 3,
        (TIMEOUT,) * 3,
    ]


# --- level 1 --------------------------------------------------------------------------------------------------------


def test_prompts_draw_bugs_of_their_side():
    sides = [{drawn(prompt(seed, held_out=side)).module for seed in range(200)} for side in (False, True)]
    assert sides == [set(TRAINING), set(HELD_OUT)]
    assert drawn(prompt(5)) == drawn(prompt(5))


def test_trying_and_taking():
    for seed in range(30):
        environment, bug = ChooseRepair(), drawn(prompt(seed))
        first = environment.reset(prompt(seed))
        told, *rows, rules = first.observation.splitlines()
        assert bug.symptom in told
        assert rules == RULES
        right = next(row[0] for row in rows if row[2:] == shown(bug.edit.inverse()) and row[0] in LETTERS)
        passing = [letter for letter in LETTERS if PASSES in environment.step(f"try {letter}").observation]
        assert right in passing
        final = environment.step(f"I take {right}")
        assert (final.reward, final.done) == (1.0, True)
        environment.reset(prompt(seed))
        wrong = next(letter for letter in LETTERS if letter != right)
        assert environment.step(f"take {wrong}").reward == 0.0
        with pytest.raises(EnvironmentFault, match="reset"):
            environment.step("take A")


def test_the_order_of_the_candidates_is_drawn():
    places = Counter()
    for seed in range(200):
        environment, bug = ChooseRepair(), drawn(prompt(seed))
        environment.reset(prompt(seed))
        places[environment._candidates.index(bug.candidates[0])] += 1
    assert min(places[place] for place in range(4)) > 25


def test_the_state_is_what_was_tried():
    environment = ChooseRepair()
    begin = environment.reset(prompt(1)).state
    one = environment.step("try B").state
    assert environment.step("?").observation == RULES
    assert environment.step("try B").state == one != begin
    two = environment.step("try A").state
    environment.reset(prompt(1))
    environment.step("try A")
    assert environment.step("try B").state == two


def test_edits_are_shown_in_a_line():
    assert shown(Edit(4, ("    if a:", "        b()"), ())) == "line 4: remove if a: b()"
    assert shown(Edit(4, (), ("    b()",))) == "after line 3: insert b()"


# --- task folders ---------------------------------------------------------------------------------------------------


def carried_out(script, root):
    """Run a script of a task with the folders of the sandbox below `root`."""
    text = script.read_text()
    for place in ("/app", "/tests", "/logs"):
        text = text.replace(place, f"{root}{place}")
    subprocess.run(["bash", "-c", text], check=True, env={"PATH": os.environ["PATH"]})


@pytest.mark.parametrize("level", [2, 3])
def test_folders_are_graded_1_after_their_solution_and_0_before(level, tmp_path):
    folders = generate(tmp_path / "tasks", level=level, held_out=level == 3, count=3, seed=4)
    assert len(folders) == 3
    for folder in folders:
        root = tmp_path / folder.name
        (root / "logs").mkdir(parents=True)
        (root / "app").mkdir()
        for file in (folder / "environment").glob("*.py"):
            (root / "app" / file.name).write_bytes(file.read_bytes())
        (root / "tests").symlink_to(folder / "tests")
        reward = root / "logs" / "verifier" / "reward.txt"
        carried_out(folder / "tests" / "test.sh", root)
        assert reward.read_text().strip() == "0"
        carried_out(folder / "solution" / "solve.sh", root)
        carried_out(folder / "tests" / "test.sh", root)
        assert reward.read_text().strip() == "1"
        name = tomllib.loads((folder / "task.toml").read_text())["metadata"]["module"]
        said = subprocess.run(
            ["python3", "check.py"], cwd=root / "app", capture_output=True, text=True, check=True
        ).stdout
        assert "of" in said
        assert said.split()[0] == said.split()[2]
        (root / "app" / f"{name}.py").write_text("import os\nos._exit(0)\n")
        carried_out(folder / "tests" / "test.sh", root)
        assert reward.read_text().strip() == "0"


def test_folders_are_complete_and_say_what_they_are(tmp_path):
    for folder in generate(tmp_path, level=2, count=20):
        task = tomllib.loads((folder / "task.toml").read_text())
        about = task["metadata"]
        assert task["task"]["name"] == f"rollart/{folder.name}"
        assert about["grade"] in (1, 2)
        assert about["module"] in TRAINING
        assert about["held_out"] is False
        assert task["environment"]["network_mode"] == "no-network"
        source = (folder / "environment" / f"{about['module']}.py").read_text()
        assert source != module(about["module"]).source
        assert f"`/app/{about['module']}.py`" in (folder / "instruction.md").read_text()
        assert os.access(folder / "tests" / "test.sh", os.X_OK)
        assert "cases" not in {file.stem for file in (folder / "environment").iterdir()}
        assert json.loads((folder / "tests" / "cases.json").read_text())


def test_all_bugs_become_folders_once(tmp_path):
    paths = [
        path for level in (2, 3) for side in (False, True) for path in generate(tmp_path, level=level, held_out=side)
    ]
    assert len(paths) == len(set(paths)) == sum(len(bugs(name)) for name in MODULES)


def test_a_level_without_folders_is_refused(tmp_path):
    with pytest.raises(RequestError, match="levels are 2, 3"):
        generate(tmp_path, level=1)
