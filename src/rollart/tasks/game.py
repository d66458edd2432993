"""Guess the number, with hints: `higher` or `lower`, and the range that is left.

Numbers have two digits. The range starts anywhere and the secret is anywhere in it, so the agent has to learn where to
guess, not which number. Binary search finds one of 31 numbers in 5 guesses; there are 6. The reward is 1 for the number
and 0 when the guesses are used up; an answer without a number wastes a guess.
"""

import random
import re
from collections.abc import Sequence

from rollart.ports.environment import TextStep
from rollart.tasks.split import draw
from rollart.types.errors import EnvironmentFault, RequestError
from rollart.types.trajectory import Prompt

LOWEST, HIGHEST = 10, 99
RULES = "Guess my number in {} guesses."
HIGHER, LOWER, FOUND, HINT = "higher", "lower", "yes", "Say a number."
TEXTS = (RULES, HIGHER, LOWER, FOUND, HINT)
_GUESS = re.compile(r"\d{1,9}")
_RANGE = re.compile(r"(\d+)-(\d+)$")


class GuessTheNumber:
    """A `TextEnvironment`. The first number in an answer is the guess."""

    def __init__(self, numbers: int = 31, guesses: int = 6) -> None:
        if not 1 <= numbers <= HIGHEST - LOWEST + 1 or guesses < 1:
            raise RequestError(f"{numbers} numbers and {guesses} guesses are not a game; use 1 to 90, and at least 1")
        self._numbers = numbers
        self._guesses = guesses
        self._left = 0
        self._low = self._high = self._secret = 0

    def reset(self, prompt: Prompt) -> TextStep:
        self._low, self._high, self._secret = map(int, draw(prompt, self._game).split())
        self._left = self._guesses
        return TextStep(f"{RULES.format(self._guesses)}\n{self._low}-{self._high}")

    def step(self, action: str) -> TextStep:
        if not self._left:
            raise EnvironmentFault("step before reset: there is no number to guess")
        self._left -= 1
        found = _GUESS.search(action)
        guess = int(found[0]) if found else None
        if guess == self._secret:
            self._left = 0
            return TextStep(FOUND, 1.0, done=True)
        if guess is None:
            hint = HINT
        elif guess < self._secret:
            hint, self._low = HIGHER, max(self._low, guess + 1)
        else:
            hint, self._high = LOWER, min(self._high, guess - 1)
        return TextStep(f"{hint} {self._low}-{self._high}", done=not self._left)

    def close(self) -> None:
        self._left = 0

    def _game(self, seed: int) -> str:
        chance = random.Random(seed)
        low = chance.randint(LOWEST, HIGHEST - self._numbers + 1)
        return f"{low} {low + self._numbers - 1} {chance.randint(low, low + self._numbers - 1)}"


# --- scripts --------------------------------------------------------------------------------------------------------


def any_number(observations: Sequence[str], chance: random.Random) -> str:
    """Anywhere in the initial range, ignoring the hints."""
    return str(chance.randint(*_bounds(observations[0])))


def within_bounds(observations: Sequence[str], chance: random.Random) -> str:
    return str(chance.randint(*_bounds(observations[-1])))


def a_third_up(observations: Sequence[str], chance: random.Random) -> str:  # noqa: ARG001 - deterministic
    low, high = _bounds(observations[-1])
    return str(low + (high - low) // 3)


def halving(observations: Sequence[str], chance: random.Random) -> str:  # noqa: ARG001 - deterministic
    low, high = _bounds(observations[-1])
    return str((low + high) // 2)


def _bounds(observation: str) -> tuple[int, int]:
    found = _RANGE.search(observation)
    if found is None:
        raise EnvironmentFault(f"the observation has no range: {observation!r}")
    return int(found[1]), int(found[2])
