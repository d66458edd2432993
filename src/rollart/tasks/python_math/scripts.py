"""Scripted players of the word problems."""

import random
import re
from collections.abc import Sequence

from rollart.tasks.python_math.environment import HINT, PythonMath
from rollart.tasks.python_math.problems import LEVELS, matching, program_for
from rollart.tasks.python_math.trusted import value_of

HASTE = 0.12
"""Probability per turn that `careless` answers with a number of the text, before it has calculated."""
MISREADING = 0.3
"""Probability that it takes the problem for one of another kind."""


def trusted_environment(level: int = 1, **settings: object) -> PythonMath:
    """What scripts play: programs of this package need no sandbox. `settings` of the sandbox are ignored."""
    del settings
    return PythonMath(level, tool=lambda program: str(value_of(program)))


def any_answer(observations: Sequence[str], chance: random.Random) -> str:  # noqa: ARG001 - ignores the observations
    return f"answer {chance.randint(100, 999)}"


def in_the_head(observations: Sequence[str], chance: random.Random) -> str:  # noqa: ARG001 - deterministic
    """Calculates with one digit of every number."""
    rounded = re.sub(r"\d+", lambda number: str(round(int(number[0]), 1 - len(number[0]))), _program(observations))
    try:
        return f"answer {value_of(rounded)}"
    except ArithmeticError:
        return "answer 0"


def with_python(observations: Sequence[str], chance: random.Random) -> str:  # noqa: ARG001 - deterministic
    return _run(_program(observations)) if len(observations) == 1 else _answer(observations[-1])


def careless(observations: Sequence[str], chance: random.Random) -> str:
    """Uses Python, but sometimes answers too early, and sometimes misreads the problem."""
    if chance.random() < HASTE:
        return _answer(observations[-1])
    if len(observations) == 1 and chance.random() < MISREADING:
        return _run(_misread(observations[0], chance))
    return with_python(observations, chance)


def _program(observations: Sequence[str]) -> str:
    return program_for(observations[0])


def _misread(text: str, chance: random.Random) -> str:
    """The program of another kind of level 1, with the numbers of this problem."""
    ((kind, numbers),) = matching(text)
    others = [each for each in LEVELS[1].kinds if each is not kind and len(each.ranges) <= len(numbers)]
    return (chance.choice(others) if others else kind).program.format(*numbers)


def _run(program: str) -> str:
    return f"```python\n{program}\n```" if "\n" in program else f"py {program}"


def _answer(observation: str) -> str:
    """The first number of an observation."""
    found = re.search(r"-?\d+", observation)
    return f"answer {found[0]}" if found else HINT
