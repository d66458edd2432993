"""Scripted players: baselines to stand beside a trained policy, and transcripts for a cold start.

A script sees what an agent sees, the observations so far, and nothing else.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from rollart.ports.environment import TextEnvironment
from rollart.types.trajectory import Prompt

Script = Callable[[Sequence[str], random.Random], str]
"""`script(observations so far, chance)` gives the next answer."""
SUCCESS = 1.0
"""An episode whose reward reaches this was solved; true of all built-in tasks."""


class Transcript(NamedTuple):
    """An episode in text: to each observation its answer, and what it came to."""

    turns: tuple[tuple[str, str], ...]
    reward: float

    @property
    def success(self) -> bool:
        return self.reward >= SUCCESS


def play(environment: TextEnvironment, prompt: Prompt, script: Script, *, max_turns: int, seed: int = 0) -> Transcript:
    """One episode. The same arguments give the same transcript."""
    chance = random.Random(f"{seed}/{prompt.task}/{prompt.seed}")
    observations: list[str] = []
    answers: list[str] = []
    reward = 0.0
    step = environment.reset(prompt)
    while not step.done and len(answers) < max_turns:
        observations.append(step.observation)
        answers.append(script(observations, chance))
        step = environment.step(answers[-1])
        reward += step.reward
    environment.close()
    return Transcript(tuple(zip(observations, answers, strict=True)), reward)


def success_rate(
    environment: TextEnvironment, prompts: Iterable[Prompt], script: Script, *, max_turns: int, seed: int = 0
) -> float:
    """The share of these prompts that a script solves."""
    played = [play(environment, prompt, script, max_turns=max_turns, seed=seed).success for prompt in prompts]
    return sum(played) / len(played)
