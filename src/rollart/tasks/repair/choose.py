"""Repair, level 1: choose among candidate edits. It needs no sandbox, because the candidates were run beforehand.

    A test of money.py fails: split(100, 3) gives [33, 33, 33], not [34, 33, 33]
    A line 37: share, rest = divmod(people, cents)
    B line 40: shares.append(share + 1 if number < rest else share)
    …
    Say try A or take A.                                                  try A
    A fails 3 tests                                                       try B
    B passes all tests                                                    take B

`try` runs the tests that the agent may see; `take` ends the episode, with a reward of 1 if all tests pass, hidden ones
included, and else 0. Anything else wastes a turn. Level 1 suits models of 1–3 M parameters: they can learn to try
before they take, without reading code. At levels 2 and 3 files are edited freely (`editing`).
"""

import random
import re
from collections.abc import Sequence

from rollart.ports.environment import TextStep
from rollart.tasks.repair.bugs import HELD_OUT, TRAINING, Bug, Candidate, drawn, module
from rollart.tasks.repair.edits import Edit
from rollart.types.errors import EnvironmentFault
from rollart.types.trajectory import Prompt

LETTERS = "ABCD"
RULES = "Say try A or take A."
FAILS, PASSES, TAKEN = "fails {} tests", "passes all tests", "taken"
_FAILED = "A test of {} fails: {}"
_LINE, _AFTER, _REMOVE, _INSERT = "line", "after line", "remove", "insert"
_LONGEST = 72
TEXTS = (
    RULES, FAILS, PASSES, TAKEN, _FAILED, "gives not", "try A take B C D", f"{_LINE} {_AFTER} {_REMOVE} {_INSERT}",
    *(module(name).source for name in (*TRAINING, *HELD_OUT)),
)  # fmt: skip
_ACTION = re.compile(rf"\b(try|take)\s*([{LETTERS}])\b")


class ChooseRepair:
    """A `TextEnvironment`. The first action in an answer counts."""

    def __init__(self) -> None:
        self._bug: Bug | None = None
        self._candidates: tuple[Candidate, ...] = ()
        self._tried = ""

    def reset(self, prompt: Prompt) -> TextStep:
        bug = drawn(prompt)
        self._bug, self._tried = bug, ""
        self._candidates = tuple(random.Random(prompt.seed).sample(bug.candidates, len(bug.candidates)))
        failure = _FAILED.format(f"{bug.module}.py", bug.symptom)
        rows = [f"{letter} {shown(each.edit)}" for letter, each in zip(LETTERS, self._candidates, strict=True)]
        return TextStep("\n".join([failure, *rows, RULES]), state=self._state())

    def step(self, action: str) -> TextStep:
        if self._bug is None:
            raise EnvironmentFault("step before reset: there is nothing to repair")
        said = _ACTION.search(action)
        if said is None:
            return TextStep(RULES, state=self._state())
        candidate = self._candidates[LETTERS.index(said[2])]
        if said[1] == "take":
            self._bug = None
            return TextStep(TAKEN, float(not candidate.failed), done=True)
        failed = len(set(self._bug.visible).intersection(candidate.failed))
        self._tried = "".join(sorted({*self._tried, said[2]}))
        return TextStep(f"{said[2]} {FAILS.format(failed) if failed else PASSES}", state=self._state())

    def close(self) -> None:
        self._bug = None

    def _state(self) -> str:
        """What was tried: all attempts at a prompt share one bug and the order of its candidates."""
        return f"tried {self._tried}"


def shown(edit: Edit) -> str:
    """An edit on one line.

    >>> shown(Edit(7, ("    x = 1",), ("    x = 2",))), shown(Edit(3, (), ("if a:", "    b()")))
    ('line 7: x = 2', 'after line 2: insert if a: b()')
    """
    text = " ".join(line.strip() for line in edit.new or edit.old)[:_LONGEST]
    if not edit.old:
        return f"{_AFTER} {edit.first - 1}: {_INSERT} {text}"
    return f"{_LINE} {edit.first}: {text if edit.new else f'{_REMOVE} {text}'}"


# --- scripts --------------------------------------------------------------------------------------------------------


def any_candidate(observations: Sequence[str], chance: random.Random) -> str:  # noqa: ARG001 - ignores them
    return f"take {chance.choice(LETTERS)}"


def one_try(observations: Sequence[str], chance: random.Random) -> str:
    """Try one; take it if it passes, and else another."""
    if len(observations) == 1:
        return f"try {chance.choice(LETTERS)}"
    letter, _, said = observations[-1].partition(" ")
    return f"take {letter if said == PASSES else chance.choice([each for each in LETTERS if each != letter])}"


def until_it_passes(observations: Sequence[str], chance: random.Random) -> str:  # noqa: ARG001 - deterministic
    """Try one after the other, and take the first that passes all tests that can be seen."""
    letter, _, said = observations[-1].partition(" ")
    return f"take {letter}" if said == PASSES else f"try {LETTERS[(len(observations) - 1) % len(LETTERS)]}"
