"""Bugs of the modules in `modules`, and candidate edits for each.

Every bug is an edit after which at least one test of the module fails; the module as it is passes them all. A candidate
is an edit of the module with the bug: the one that undoes it, or another mutation of the same function. What the tests
make of each was found out by running them (`verify`), and is kept in `verified.json`.

Training and held-out bugs are apart by module.
"""

import ast
import json
import random
from collections.abc import Sequence
from functools import lru_cache
from importlib import resources
from typing import Any, NamedTuple

from rollart.config.load import load_toml
from rollart.tasks import split
from rollart.tasks.repair.edits import GRADES, Edit, Kind
from rollart.types.trajectory import Prompt

TRAINING = (
    "brackets", "cipher", "dates", "graphs", "grid", "intervals", "matrices", "polynomials", "primes", "rpn",
    "runlength",
)  # fmt: skip
HELD_OUT = ("money", "roman", "scores", "versions", "wrapping")
VERIFIED = "verified.json"
LEVELS = {2: (1, 2), 3: (3,)}
"""Grades of the bugs of the levels with free editing. Level 1, choosing, has all."""


class Case(NamedTuple):
    """One test: an expression with an expected value or error, as text; the other is empty."""

    expression: str
    expected: str
    error: str

    def symptom(self, gave: str) -> str:
        return f"{self.expression} gives {gave}, not {self.expected or self.error}"


class Module(NamedTuple):
    name: str
    source: str
    cases: tuple[Case, ...]


class Candidate(NamedTuple):
    """An edit of the module with the bug, and the numbers of the tests that fail after it."""

    edit: Edit
    failed: tuple[int, ...]


class Bug(NamedTuple):
    module: str
    kind: Kind
    function: str
    edit: Edit
    failed: tuple[int, ...]
    """Numbers of the tests that fail; at least one."""
    gave: str
    """What the first of them gave."""
    candidates: tuple[Candidate, ...]
    """The right one first; it alone passes all tests."""

    @property
    def grade(self) -> int:
        return GRADES[self.kind]

    @property
    def visible(self) -> tuple[int, ...]:
        """Numbers of the tests that the agent may run: every other one, and the first that fails."""
        count = len(module(self.module).cases)
        return tuple(number for number in range(count) if number % 2 == 0 or number == self.failed[0])

    @property
    def symptom(self) -> str:
        """The first test that fails, in words."""
        return module(self.module).cases[self.failed[0]].symptom(self.gave)


@lru_cache
def module(name: str) -> Module:
    """A module as it should be, and all its tests."""
    with resources.as_file(resources.files("rollart.tasks.repair") / "modules") as folder:
        cases = load_toml(folder / f"{name}.toml")["cases"].strip().splitlines()
        return Module(name, (folder / f"{name}.py").read_text(encoding="utf-8"), tuple(map(read_case, cases)))


def read_case(line: str) -> Case:
    """
    >>> read_case("clamp(5, 0, 3) == 3").expected, read_case("parse('x') raises ValueError").error
    ('3', 'ValueError')
    """
    expression, raises, error = line.rpartition(" raises ")
    if raises:
        return Case(expression, "", error)
    compared = ast.parse(line, mode="eval").body
    if not isinstance(compared, ast.Compare) or len(compared.ops) != 1:
        raise ValueError(f"not a test: {line}")
    return Case(ast.unparse(compared.left), ast.unparse(compared.comparators[0]), "")


def bugs(name: str) -> tuple[Bug, ...]:
    """Verified bugs of a module."""
    return _verified()[name]


def drawn(prompt: Prompt, level: int = 1) -> Bug:
    """The bug of a prompt: of a module on its side, and of the level's grades."""
    side = prompt.data.get(split.HELD_OUT)
    names = (*TRAINING, *HELD_OUT) if side is None else HELD_OUT if side else TRAINING
    if level == 1:
        chance = random.Random(f"repair/{prompt.seed}")
        return chance.choice(bugs(chance.choice(names)))
    chance = random.Random(f"repair/{level}/{prompt.seed}")
    fitting = [found for name in names if (found := [bug for bug in bugs(name) if bug.grade in LEVELS[level]])]
    return chance.choice(chance.choice(fitting))


@lru_cache
def _verified() -> dict[str, tuple[Bug, ...]]:
    text = (resources.files("rollart.tasks.repair") / VERIFIED).read_text(encoding="utf-8")
    return {name: tuple(_bug(name, record) for record in records) for name, records in json.loads(text).items()}


def record_of(bug: Bug) -> dict[str, Any]:
    """A bug as it is kept; without what follows from the module and the edit."""
    return {
        "kind": bug.kind,
        "function": bug.function,
        "edit": _edit_record(bug.edit),
        "failed": bug.failed,
        "gave": bug.gave,
        "wrong": [[*_edit_record(each.edit), each.failed] for each in bug.candidates[1:]],
    }


def _edit_record(edit: Edit) -> list[Any]:
    return [edit.first, len(edit.old), edit.new]


def _bug(name: str, record: dict[str, Any]) -> Bug:
    source = module(name).source
    edit = _edit(source, *record["edit"])
    broken = edit.apply(source)
    wrong = [Candidate(_edit(broken, *changed), tuple(failed)) for *changed, failed in record["wrong"]]
    candidates = (Candidate(edit.inverse(), ()), *wrong)
    return Bug(
        name, Kind(record["kind"]), record["function"], edit, tuple(record["failed"]), record["gave"], candidates
    )


def _edit(source: str, first: int, lines: int, new: Sequence[str]) -> Edit:
    return Edit(first, tuple(source.splitlines()[first - 1 : first - 1 + lines]), tuple(new))
