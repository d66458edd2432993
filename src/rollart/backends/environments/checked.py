"""Validation of what an environment returns."""

import math
import numbers

from rollart.ports.environment import TextStep
from rollart.types.chat import problem_of


def problem(step: object) -> str:
    """Why this is not a valid answer of an environment; empty if it is."""
    if not isinstance(step, TextStep):
        return f"the environment returned a {type(step).__name__}; it must be a TextStep"
    observation: object = step.observation
    reward: object = step.reward
    artifact: object = step.artifact
    state: object = step.state
    if not isinstance(observation, str):
        wrong = problem_of(observation)
        if wrong:
            return f"the observation must be text or messages: {wrong}"
    if isinstance(reward, bool) or not isinstance(reward, numbers.Real) or not math.isfinite(reward):
        return f"the reward is {reward!r}; it must be a finite number"
    if not isinstance(artifact, bytes):
        return f"the artifact is a {type(artifact).__name__}; it must be bytes"
    if not isinstance(state, str):
        return f"the state is a {type(state).__name__}; it must be a str"
    return ""
