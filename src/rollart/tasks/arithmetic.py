"""Arithmetic with a calculator: few turns, longer answers.

The problem has several operations, such as 12*7+5, and the calculator does one at a time: the agent says `C 12*7` and
is told what is left, 84+5; then it says `C 84+5`, is told 89, and says `A 89`. An operation that the problem does not
begin with is calculated all the same, but the agent has to put it to use by itself. The reward is 1 for the right
answer. All other sayings are lost turns.
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
    """A `TextEnvironment`. The problem is drawn from the prompt's seed, or stands in its data as `problem`."""

    def __init__(self, operations: int = 2) -> None:
        self._operations = operations
        self._result: int | None = None
        self._left = ""
        """The problem with what was calculated in its place."""

    def reset(self, prompt: Prompt) -> TextStep:
        problem = prompt.data.get("problem") or draw(prompt, self._problem)
        if not (isinstance(problem, str) and _PROBLEM.fullmatch(problem)):
            raise RequestError(f"prompt {prompt.id}: problem {problem!r} is none; write it as 12*7+5")
        self._result, self._left = value(problem), problem
        return TextStep(f"{RULES}\n{problem}")

    def step(self, action: str) -> TextStep:
        if self._result is None:
            raise EnvironmentFault("step before reset: there is no problem yet")
        if answer := _ANSWER.search(action):
            right = int(answer[1]) == self._result
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
        """A product, then sums and differences. Numbers have two digits, and all results three.

        With one length for all, copying a number is looking back by so many tokens, which small models learn soon. A
        sum would do to begin with, but its first digit is mostly 1, and guessed soon instead of copied.
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


def calculate(left: int, sign: str, right: int) -> int:
    return left + right if sign == "+" else left - right if sign == "-" else left * right


def value(problem: str) -> int:
    """What a problem comes to, products first.

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


def any_answer(observations: Sequence[str], chance: random.Random) -> str:  # noqa: ARG001 - it does not look
    return f"A {chance.randint(0, 999)}"


def with_calculator(observations: Sequence[str], chance: random.Random) -> str:  # noqa: ARG001 - nothing is left to chance
    """The first operation of what is left: right for problems whose products come first, as the drawn ones."""
    left = observations[-1].splitlines()[-1]
    first = re.match(r"\d+[-+*]\d+", left)
    return f"C {first[0]}" if first else f"A {left}"


def hasty(observations: Sequence[str], chance: random.Random) -> str:
    """Uses the calculator, but now and then answers with the first number it sees."""
    if chance.random() < HASTE:
        return f"A {re.split('[-+*]', observations[-1].splitlines()[-1])[0]}"
    return with_calculator(observations, chance)


HASTE = 0.1
"""The chance in every turn that `hasty` does not calculate."""
