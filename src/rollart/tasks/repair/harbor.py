"""Repair, levels 2 and 3, for other programs: Harbor task folders, one per bug.

    repair-money-07/
      task.toml  instruction.md
      environment/Dockerfile  money.py  check.py     the module with the bug, and the tests that the agent may run
      solution/solve.sh                              puts the module back as it was
      tests/test.sh  runner.py  cases.json           all tests

`tests/test.sh` writes 1 or 0 to `/logs/verifier/reward.txt`. It runs the code under test in its own process, as most
Harbor tasks do: enough for honest agents. `editing` plays the same bugs with a grader outside of that process.
"""

import json
import random
import shlex
from pathlib import Path

from rollart.tasks.repair import runner
from rollart.tasks.repair.bugs import HELD_OUT, LEVELS, TRAINING, Bug, bugs, module
from rollart.types.errors import RequestError

TASK = """\
schema_version = "1.1"

[task]
name = "rollart/{name}"
description = "Repair {function} in {file}"
keywords = ["repair", "python", "grade-{grade}"]

[metadata]
module = "{module}"
kind = "{kind}"
grade = {grade}
held_out = {held_out}

[agent]
timeout_sec = 600.0

[verifier]
timeout_sec = 60.0

[environment]
build_timeout_sec = 300.0
cpus = 1
memory_mb = 1024
storage_mb = 1024
network_mode = "no-network"
"""
INSTRUCTION = """\
`/app/{file}` has a bug: {symptom}.

Repair the module. What its functions must do is in their docstrings; keep their names and arguments. Some of the tests
can be run with `python3 check.py` in `/app`; others are hidden.
"""
DOCKERFILE = """\
FROM python:3.11-slim
WORKDIR /app
COPY {file} check.py /app/
"""
CHECK = '''\
"""Run the tests of {file} that are known."""

import {module} as candidate

CASES = [
{cases}
]


def main():
    failed = 0
    for expression, expected, error in CASES:
        try:
            gave, raised = eval(expression, vars(candidate)), ""
        except Exception as problem:
            gave, raised = None, type(problem).__name__
        if raised != error or (not error and gave != eval(expected)):
            failed += 1
            print(f"{{expression}} gives {{raised or repr(gave)}}, not {{expected or error}}")
    print(f"{{len(CASES) - failed}} of {{len(CASES)}} tests pass")


main()
'''
SOLVE = """\
#!/bin/bash
set -eu
cat > /app/{file} <<'END_OF_MODULE'
{source}END_OF_MODULE
"""
TEST = """\
#!/bin/bash
set -u
mkdir -p /logs/verifier
python3 -I /tests/grade.py /app/{file} > /logs/verifier/reward.txt
"""
GRADE = '''\
"""Print 1 if all tests pass, else 0."""

import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
source = Path(sys.argv[1]).read_text(encoding="utf-8") if Path(sys.argv[1]).is_file() else "raise SystemExit"
order = {"cases": json.loads((HERE / "cases.json").read_text()), "sources": [source]}
ran = subprocess.run(
    [sys.executable, "-I", "-S", str(HERE / "runner.py")], input=json.dumps(order), capture_output=True, text=True
)
try:
    (results,) = json.loads(ran.stdout)
    passed = len(results) == len(order["cases"]) and not any(results)
except ValueError:
    passed = False  # the code under test ended the process
print(int(passed))
'''


def generate(
    folder: Path, *, level: int = 2, held_out: bool = False, count: int | None = None, seed: int = 0
) -> list[Path]:
    """Write task folders, in an order that depends on `seed`; at most `count` of them, all by default."""
    if level not in LEVELS:
        raise RequestError(f"repair has no folders of level {level}; levels are {', '.join(map(str, LEVELS))}")
    found = [
        (f"repair-{name}-{number:02d}", bug)
        for name in (HELD_OUT if held_out else TRAINING)
        for number, bug in enumerate(bugs(name))
        if bug.grade in LEVELS[level]
    ]
    random.Random(f"repair/{seed}").shuffle(found)
    return [_write(folder / name, bug) for name, bug in found[:count]]


def _write(folder: Path, bug: Bug) -> Path:
    known = module(bug.module)
    file = f"{bug.module}.py"
    files = {
        "task.toml": TASK.format(
            name=folder.name, file=file, module=bug.module, function=bug.function, kind=bug.kind, grade=bug.grade,
            held_out=str(bug.module in HELD_OUT).lower(),
        ),
        "instruction.md": INSTRUCTION.format(file=file, symptom=bug.symptom),
        "environment/Dockerfile": DOCKERFILE.format(file=file),
        f"environment/{file}": bug.edit.apply(known.source),
        "environment/check.py": check_text(bug),
        "solution/solve.sh": SOLVE.format(file=shlex.quote(file), source=known.source),
        "tests/test.sh": TEST.format(file=shlex.quote(file)),
        "tests/grade.py": GRADE,
        "tests/runner.py": Path(runner.__file__).read_text(encoding="utf-8"),
        "tests/cases.json": json.dumps(known.cases, indent=1),
    }  # fmt: skip
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        if path.suffix == ".sh":
            path.chmod(0o755)
    return folder


def check_text(bug: Bug) -> str:
    """A program that runs the tests that the agent may see."""
    cases = module(bug.module).cases
    rows = "\n".join(f"    {tuple(cases[number])!r}," for number in bug.visible)
    return CHECK.format(file=f"{bug.module}.py", module=bug.module, cases=rows)
