"""Word problems with Python as a tool, in the manner of GEM's maths: the agent runs programs in a sandbox and answers.

    Say py and Python, or answer and a number.
    Ann has 24 bags of 31 pens and loses 50 pens. How many pens?     py 24*31-50
    694                                                              answer 694

A program is the rest of a line after `py`, or a code block between ``` as language models write it; the value of a
last line that is an expression is printed. An answer is a number after `answer`, or in \\boxed{…}. If an action has
both, the first one counts; one without either wastes a turn. The reward is 1 for the right answer, which ends it.

No sandbox is held between programs, and a reset needs none (`tool`). Programs start anew: variables are not kept.
"""

import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from rollart.ports.environment import TextStep
from rollart.tasks.python_math.problems import BOXES, LEVELS, THINGS, draw_problem, solved
from rollart.tasks.python_math.tool import NOTHING, OVER, PythonTool
from rollart.tasks.sandboxes import BUBBLEWRAP, Lease
from rollart.tasks.split import draw
from rollart.types.errors import EnvironmentFault, RequestError
from rollart.types.sandboxes import Limits
from rollart.types.trajectory import Prompt

RULES = "Say py and Python, or answer and a number."
HINT = "Say py or answer."
RIGHT, WRONG = "right", "wrong"
TEXTS = (
    *(RULES, HINT, RIGHT, WRONG, NOTHING, *OVER.values()),
    *(kind.text.format(*(0,) * 9, thing="", box="") for kind in LEVELS[1].kinds),
    *(f"{word} {word}" for word in (*THINGS, *BOXES)),
)
"""Texts of level 1; those of other levels are for real models, which have words of their own."""
SMALL_CHARS, MOST_CHARS = 40, 1000
"""Limit of the output that is shown, on level 1 and on others."""

_NUMBER = r"-?\d[\d,]{0,60}(?:\.\d{1,20})?"
_ACTION = re.compile(
    rf"""```(?:python|py)?\s*\n(?P<block>.*?)(?:```|\Z)
    | \bpy[ ](?P<line>[^\n]+)
    | \banswer(?:[ ]is)?\s*[:=]?\s*(?P<answer>{_NUMBER})
    | \\boxed\{{\s*(?P<boxed>{_NUMBER})\s*\}}""",
    re.VERBOSE | re.DOTALL | re.IGNORECASE,
)


class PythonMath:
    """A `TextEnvironment`. Problems are generated, or rows of a dataset with the fields `problem` and `answer`."""

    def __init__(
        self,
        level: int = 1,
        time_s: float = 5.0,
        memory_mb: int = 64,
        sandboxes: str = BUBBLEWRAP,
        *,
        tool: Callable[[str], str] | None = None,
    ) -> None:
        """`time_s`, `memory_mb`: limits of a program. `sandboxes`: factory of their source. `tool`: replaces them."""
        if level not in LEVELS:
            raise RequestError(f"level {level} does not exist; there are levels 1 to {len(LEVELS)}")
        self._level = level
        self._tool = tool or PythonTool(
            sandboxes,
            Limits(time_s=time_s, memory_mb=memory_mb, disk_mb=4, file_mb=4, files=200, processes=16, output_kb=16),
            SMALL_CHARS if level == 1 else MOST_CHARS,
        )
        self._result: Decimal | None = None

    @staticmethod
    def open_shared(*, sandboxes: str = BUBBLEWRAP, **settings: Any) -> Lease:  # noqa: ARG004 - of the environments
        """The source of sandboxes, while a worker has environments."""
        return Lease(sandboxes)

    def reset(self, prompt: Prompt) -> TextStep:
        text = prompt.data.get("problem") or draw(prompt, lambda seed: draw_problem(self._level, seed))
        if not isinstance(text, str):
            raise RequestError(f"prompt {prompt.id}: its problem is {text!r}; it has to be text")
        given = prompt.data.get("answer")
        self._result = Decimal(solved(text).result) if given is None else _number(str(given))
        if self._result is None:
            raise RequestError(f"prompt {prompt.id}: its answer is {given!r}; it has to be a number")
        return TextStep(f"{RULES}\n{text}")

    def step(self, action: str) -> TextStep:
        if self._result is None:
            raise EnvironmentFault("step before reset: there is no problem yet")
        found = _ACTION.search(action)
        if found is None:
            return TextStep(HINT)
        program = found["line"] if found["block"] is None else found["block"]
        if program is not None:
            return TextStep(self._tool(program))
        right = _number(found["answer"] or found["boxed"] or "") == self._result
        return TextStep(RIGHT if right else WRONG, float(right), done=True)

    def close(self) -> None:
        self._result = None


def _number(text: str) -> Decimal | None:
    """
    >>> _number("1,250"), _number("-7.50"), _number("seven")
    (Decimal('1250'), Decimal('-7.50'), None)
    """
    return Decimal(text.replace(",", "")) if re.fullmatch(_NUMBER, text.strip()) else None
