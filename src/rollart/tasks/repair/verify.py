"""Find bugs and candidates by running the tests: `python -m rollart.tasks.repair.verify` writes `verified.json`.

To be run after every change of a module, its tests or the mutations. Code runs in a process of its own, under limits of
CPU time and memory (`runner`). Mutations that do not end are left out.
"""

import json
import random
import subprocess
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from rollart.tasks.repair import runner
from rollart.tasks.repair.bugs import HELD_OUT, TRAINING, VERIFIED, Bug, Candidate, Case, module, record_of
from rollart.tasks.repair.edits import GRADES, Edit, Mutation, mutations
from rollart.types.errors import RunError

BUGS = 30
"""Most bugs of a module; a third of each grade, as far as there are so many."""
WRONG = 3
"""Wrong candidates of a bug."""
_TRIED = 6
"""Mutations tried for the wrong candidates of a bug."""
_LIMIT_S = 600.0

Results = tuple[str | None, ...]
"""What each test gave; None if it passed."""


def results(cases: Sequence[Case], sources: Sequence[str]) -> list[Results]:
    """Run all tests on every source, in a process of its own."""
    try:
        ran = subprocess.run(
            [sys.executable, "-I", "-S", str(Path(runner.__file__))],
            input=json.dumps({"cases": cases, "sources": sources}),
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=True,
        )
    except subprocess.SubprocessError as error:
        raise RunError(f"the tests could not be run: {error}") from error
    return [tuple(each) for each in json.loads(ran.stdout)]


def verified_bugs(name: str) -> list[Bug]:
    """Bugs of a module and their candidates, drawn by the module's name."""
    known = module(name)
    chance = random.Random(f"repair/{name}")
    found = list(mutations(known.source))
    reference, *outcomes = results(known.cases, [known.source, *(each.edit.apply(known.source) for each in found)])
    if any(reference):
        raise RunError(f"the module {name} fails its own tests: {reference}")
    real = {bug: gave for bug, gave in zip(found, outcomes, strict=True) if any(gave) and runner.TIMEOUT not in gave}
    chosen = _balanced(list(real), chance)
    tried = {bug: _others(bug, known.source, chance) for bug in chosen}
    sources = [edit.apply(bug.edit.apply(known.source)) for bug, edits in tried.items() for edit in edits]
    ran = iter(results(known.cases, sources))
    verified = []
    for bug, edits in tried.items():
        right = Candidate(bug.edit.inverse(), ())
        wrong = [candidate for candidate in (Candidate(edit, failed(next(ran))) for edit in edits) if candidate.failed]
        if len(wrong) >= WRONG:
            gave = next(text for text in real[bug] if text is not None)
            candidates = (right, *wrong[:WRONG])
            verified.append(Bug(name, bug.kind, bug.function, bug.edit, failed(real[bug]), gave, candidates))
    return verified


def failed(given: Results) -> tuple[int, ...]:
    """Numbers of the tests that failed."""
    return tuple(number for number, text in enumerate(given) if text is not None)


def _balanced(real: list[Mutation], chance: random.Random) -> list[Mutation]:
    """Some of all grades, in the order of the source."""
    shuffled = chance.sample(real, len(real))
    grades = [[bug for bug in shuffled if GRADES[bug.kind] == grade] for grade in sorted(set(GRADES.values()))]
    first = [bug for bugs in grades for bug in bugs[: BUGS // len(grades)]]
    chosen = [*first, *(bug for bug in shuffled if bug not in first)][:BUGS]
    return [bug for bug in real if bug in chosen]


def _others(bug: Mutation, source: str, chance: random.Random) -> list[Edit]:
    """Other edits of the function with the bug."""
    here = [each.edit for each in mutations(bug.edit.apply(source)) if each.function == bug.function]
    others = [edit for edit in here if edit != bug.edit.inverse()]
    return chance.sample(others, min(_TRIED, len(others)))


def main() -> None:
    records = {}
    for name in (*TRAINING, *HELD_OUT):
        records[name] = [record_of(bug) for bug in verified_bugs(name)]
        sys.stdout.write(f"{name}: {len(records[name])} bugs\n")
        sys.stdout.flush()
    rows = (
        f"{json.dumps(name)}: [\n" + ",\n".join(json.dumps(record, separators=(",", ":")) for record in some) + "\n]"
        for name, some in records.items()
    )
    with resources.as_file(resources.files("rollart.tasks.repair") / VERIFIED) as path:
        path.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
