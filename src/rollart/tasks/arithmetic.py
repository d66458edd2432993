"""Arithmetic with a calculator: few turns, longer answers.

The problem has several operations, such as 12*7+5, and the calculator does one at a time. The agent sends `C 12*7` and
gets back the reduced problem, 84+5; it sends `C 84+5` and gets 89; then it answers `A 89`. An operation that the
problem does not start with is calculated too, but only its result is returned and the problem stays as it was. The
reward is 1 for the right answer. Anything else the agent sends wastes a turn.
"""

import random
import re
from collections.abc import Sequence

from rollart.ports.environment import TextStep
from rollart.tasks.split import draw
from rollart.types.errors import EnvironmentFault, RequestError
from rollart.types.trajectory import Prompt

RULES = "Say C to calculate one step, A to answer."
HINT = "Say C or A."
RIGHT, WRONG = "right", "wrong"
TEXTS = (RULES, HINT, RIGHT, WRONG)
_NUMBER = r"(-?\d{1,12})"
_OPERATION = re.compile(rf"C\s*{_NUMBER}\s*([-+*])\s*{_NUMBER}")
_ANSWER = re.compile(rf"A\s*{_NUMBER}")
_PROBLEM = re.compile(r"\d{1,6}([-+*]\d{1,6})+")


class Arithmetic:
    """A `TextEnvironment`. The problem is `problem` of the prompt's data, or drawn from the prompt's seed."""

    def __init__(self, operations: int = 2) -> None:
        self._operations = operations
        self._result: int | None = None
        self._left = ""
        """The problem, reduced by the operations calculated so far."""

    def reset(self, prompt: Prompt) -> TextStep:
        problem = prompt.data.get("problem") or draw(prompt, self._problem)
        if not (isinstance(problem, str) and _PROBLEM.fullmatch(problem)):
            raise RequestError(f"prompt {prompt.id}: {problem!r} is not a problem; write it like 12*7+5")
        self._result, self._left = value(problem), problem
        return TextStep(f"{RULES}\n{problem}")

    def step(self, action: str) -> TextStep:
        if self._result is None:
            raise EnvironmentFault("step before reset: there is no problem yet")
        if (answer := answered(action)) is not None:
            right = answer == self._result
            return TextStep(RIGHT if right else WRONG, float(right), done=True)
        if operation := _OPERATION.search(action):
            return TextStep(self._calculated(*operation.groups()))
        return TextStep(HINT)

    def close(self) -> None:
        self._result = None

    def _calculated(self, left: str, sign: str, right: str) -> str:
        result = str(calculate(int(left), sign, int(right)))
        begins = re.match(rf"{re.escape(left + sign + right)}(?!\d)", self._left)
        if begins is None or (sign != "*" and self._left[begins.end() :].startswith("*")):
            return result
        self._left = result + self._left[begins.end() :]
        return self._left

    def _problem(self, seed: int) -> str:
        """A product, then sums and differences. Operands have two digits and all results three.

        With numbers of one length, copying a number is attending a fixed number of tokens back, which small models
        learn quickly. A leading sum would work too, but its first digit is mostly 1 and would be guessed instead of
        copied.
        """
        chance = random.Random(seed)
        total = chance.randint(10, 99)
        problem = str(total)
        for place in range(self._operations):
            ways = [
                (sign, number)
                for sign in ("+-" if place else "*")
                for number in range(10, 100)
                if 100 <= calculate(total, sign, number) <= 999
            ]
            sign, number = chance.choice(ways)
            problem, total = f"{problem}{sign}{number}", calculate(total, sign, number)
        return problem


def answered(action: str) -> int | None:
    """The answer in an action; None if there is none.

    >>> answered("A 89"), answered("C 84+5")
    (89, None)
    """
    found = _ANSWER.search(action)
    return int(found[1]) if found else None


def calculate(left: int, sign: str, right: int) -> int:
    return left + right if sign == "+" else left - right if sign == "-" else left * right


def value(problem: str) -> int:
    """Evaluate a problem, products first.

    >>> value("12*7+5"), value("5+12*7")
    (89, 89)
    """
    total = 0
    for term in re.findall(r"[-+]?[^-+]+", problem):
        product = 1
        for factor in term.lstrip("+-").split("*"):
            product *= int(factor)
        total += -product if term[0] == "-" else product
    return total


# --- scripts --------------------------------------------------------------------------------------------------------


def any_answer(observations: Sequence[str], chance: random.Random) -> str:  # noqa: ARG001 - ignores the observations
    return f"A {chance.randint(0, 999)}"


def with_calculator(observations: Sequence[str], chance: random.Random) -> str:  # noqa: ARG001 - deterministic
    """Calculate the first remaining operation. Correct if the products come first, as in drawn problems."""
    left = observations[-1].splitlines()[-1]
    first = re.match(r"\d+[-+*]\d+", left)
    return f"C {first[0]}" if first else f"A {left}"


def hasty(observations: Sequence[str], chance: random.Random) -> str:
    """Uses the calculator, but sometimes answers with the first number it sees."""
    if chance.random() < HASTE:
        return f"A {re.split('[-+*]', observations[-1].splitlines()[-1])[0]}"
    return with_calculator(observations, chance)


HASTE = 0.1
"""Probability per turn that `hasty` does not calculate."""
