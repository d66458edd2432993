"""Tasks of `rollart bench affinity`: text of given lengths, so that a task is mostly prefill, or mostly decoding."""

import random
import string

from rollart.ports.environment import TextStep
from rollart.types.trajectory import Prompt


class Lengths:
    """A `TextEnvironment` that shows `prompt` letters, then `observation` letters in every turn but the last.

    There is no reward, so training skips its backward pass and rollout stays the bottleneck.
    """

    def __init__(self, prompt: int, observation: int, turns: int) -> None:
        self._prompt = prompt
        self._observation = observation
        self._turns = turns
        self._turn = 0
        self._seed = 0

    def reset(self, prompt: Prompt) -> TextStep:
        self._turn, self._seed = 0, prompt.seed
        return TextStep(self._letters(self._prompt, ""))

    def step(self, action: str) -> TextStep:
        self._turn += 1
        return TextStep(self._letters(self._observation, action), done=self._turn >= self._turns)

    def close(self) -> None:
        pass

    def _letters(self, count: int, action: str) -> str:
        """Different for every action, so that nothing but the prompt is shared within a group."""
        chance = random.Random(f"{self._seed}/{self._turn}/{action}")
        return "".join(chance.choices(string.ascii_lowercase, k=count))
