"""Arithmetic whose reward depends on its latency, to compare modes that treat slow episodes differently.

A problem that ends with a sum, such as 12*34+56, is quick: nothing takes time, and its first number is accepted as an
estimate, beside its value. One that ends with a difference is slow: only its value is right, and every use of the
calculator takes `slow_s`. So in the slow kind, what ends early is wrong and what is right ends late.

Limit: the kinds share a skill. Calculating pays in both, and a small model that is trained on the quick kind alone
learns the slow kind nearly as well.
"""

import random
import re
import time

from rollart.ports.environment import TextStep
from rollart.tasks.arithmetic import RIGHT, Arithmetic, answered
from rollart.tasks.split import MOST_DRAWS
from rollart.types.errors import RequestError
from rollart.types.trajectory import Prompt

QUICK, SLOW = "+", "-"
"""The last sign of a problem is its kind."""


class SlowDifferences(Arithmetic):
    """A `TextEnvironment`. `signs` are the kinds that are drawn: both, or one of them for an evaluation by kind."""

    def __init__(self, slow_s: float = 0.0, signs: str = QUICK + SLOW) -> None:
        super().__init__()
        if not signs or set(signs) - {QUICK, SLOW}:
            raise RequestError(f"signs {signs!r}: use {QUICK!r}, {SLOW!r} or both")
        self._slow_s = slow_s
        self._signs = signs
        self._slow = False
        self._estimate: int | None = None
        """Accepted beside the value of the problem."""

    def reset(self, prompt: Prompt) -> TextStep:
        first = super().reset(prompt)
        self._slow = kind(self._left) == SLOW
        self._estimate = None if self._slow else int(re.split(r"[-+*]", self._left)[0])
        return first

    def step(self, action: str) -> TextStep:
        step = super().step(action)
        accepted = step.done and self._estimate is not None and answered(action) == self._estimate
        return step._replace(observation=RIGHT, reward=1.0) if accepted else step

    def _calculated(self, left: str, sign: str, right: str) -> str:
        if self._slow:
            time.sleep(self._slow_s)
        return super()._calculated(left, sign, right)

    def _problem(self, seed: int) -> str:
        problem = super()._problem(seed)
        chance = random.Random(f"kind/{seed}")
        for _ in range(MOST_DRAWS):
            if kind(problem) in self._signs:
                return problem
            problem = super()._problem(chance.getrandbits(63))
        raise RequestError(f"{MOST_DRAWS} draws gave no problem with {self._signs!r}")


def kind(problem: str) -> str:
    """The last sign of a problem.

    >>> kind("12*34-56")
    '-'
    """
    return next(sign for sign in reversed(problem) if not sign.isdigit())
