"""Scripted players of free repair. Their answers are written in the plain format of tool calls."""

import json
import random
import re
from collections.abc import Sequence

from rollart.tasks.repair.bugs import module
from rollart.tasks.repair.edits import mutations

DONE = "Done."
_BUG = re.compile(r"`(\w+)\.py` has a bug: (\w+)\(")
_COUNT = re.compile(r"^(\d+) of (\d+) tests pass$", re.MULTILINE)


def nothing(observations: Sequence[str], chance: random.Random) -> str:  # noqa: ARG001 - a script
    """Says that it is done."""
    return DONE


def oracle(observations: Sequence[str], chance: random.Random) -> str:  # noqa: ARG001 - a script
    """Knows the module as it should be."""
    if len(observations) > 1:
        return DONE
    name, _ = named(observations[0])
    return f"{edit(name, module(name).source)}\nrun_tests:"


def tinkerer(observations: Sequence[str], chance: random.Random) -> str:  # noqa: ARG001 - a script
    """Tries mutations of the function that fails, one after the other, until all tests that it may run pass."""
    name, function = named(observations[0])
    if len(observations) == 1:
        return f"read_file: {name}.py"
    broken = observations[1].partition("\n")[2]
    if len(observations) > 2 and passes(observations[-1]):
        return DONE
    edits = [each.edit for each in mutations(broken) if each.function == function]
    number = len(observations) - 2
    return DONE if number >= len(edits) else f"{edit(name, edits[number].apply(broken))}\nrun_tests:"


def named(instruction: str) -> tuple[str, str]:
    """Module and function of a first observation."""
    found = _BUG.search(instruction)
    if found is None:
        raise ValueError(f"no bug is named in {instruction[:200]!r}")
    return found[1], found[2]


def passes(said: str) -> bool:
    """Whether all tests of a run pass."""
    count = _COUNT.search(said)
    return count is not None and count[1] == count[2]


def edit(name: str, source: str) -> str:
    """A call that replaces a module."""
    return "edit_file: " + json.dumps({"path": f"{name}.py", "old": "", "new": source})
