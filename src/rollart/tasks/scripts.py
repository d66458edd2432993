"""Scripted players: baselines for a trained policy, and transcripts for a cold start.

A script sees what an agent sees: the observations so far.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from rollart.ports.environment import TextEnvironment
from rollart.types.chat import readable
from rollart.types.trajectory import Prompt

Script = Callable[[Sequence[str], random.Random], str]
"""`script(observations so far, chance)` returns the next answer."""
SUCCESS = 1.0
"""Reward at which an episode counts as solved; holds for all built-in tasks."""


class Transcript(NamedTuple):
    """An episode as text: pairs of observation and answer, and the total reward."""

    turns: tuple[tuple[str, str], ...]
    reward: float

    @property
    def success(self) -> bool:
        return self.reward >= SUCCESS


def play(environment: TextEnvironment, prompt: Prompt, script: Script, *, max_turns: int, seed: int = 0) -> Transcript:
    """Play one episode. The same arguments give the same transcript."""
    chance = random.Random(f"{seed}/{prompt.task}/{prompt.seed}")
    observations: list[str] = []
    answers: list[str] = []
    reward = 0.0
    step = environment.reset(prompt)
    while not step.done and len(answers) < max_turns:
        observations.append(readable(step.observation))
        answers.append(script(observations, chance))
        step = environment.step(answers[-1])
        reward += step.reward
    environment.close()
    return Transcript(tuple(zip(observations, answers, strict=True)), reward)


def mean_reward(
    environment: TextEnvironment, prompts: Iterable[Prompt], script: Script, *, max_turns: int, seed: int = 0
) -> float:
    """Mean reward of a script; the share of the prompts that it solves, where an episode earns all or nothing."""
    earned = [play(environment, prompt, script, max_turns=max_turns, seed=seed).reward for prompt in prompts]
    return sum(earned) / len(earned)
