"""Workload of a task: lengths, turns, latencies and failures, all drawn by key.

Every draw is keyed by its subject (task, prompt seed, member, turn), never by trajectory id or order of arrival:
however a run is scheduled, member m of prompt p has the same number of turns with the same lengths, latencies and
failures. A replacement member gets a new number, so retrying helps.
"""

from collections.abc import Mapping
from functools import lru_cache

from pydantic import Field

from rollart.config.base import Strict
from rollart.sim.draws import Distribution, mix, stable_int, uniform

# The streams of an episode; a per-turn draw has index turn · _STREAMS + stream.
_STREAMS = 8
_LATENCY, _FAILURE, _OBSERVATION, _TURNS, _SUCCESS, _PROMPT, _ANSWER, _REWARD = range(_STREAMS)


def _constant(value: float) -> Distribution:
    return Distribution(value=value)


class TaskProfile(Strict):
    """The distributions of one task. Tokens and turns are rounded and at least 1."""

    prompt_tokens: Distribution
    observation_tokens: Distribution
    answer_tokens: Distribution
    """Per turn, before truncation by `max_tokens` or the context."""
    turns: Distribution
    reset_s: Distribution = _constant(0.0)
    step_s: Distribution = _constant(0.0)
    reward_s: Distribution = _constant(0.0)
    group_rewards: tuple[str, ...] = ()
    """Names of its rewards whose functions see the whole group."""
    part_rewards: tuple[str, ...] = ()
    """Names of its rewards whose functions give named parts."""
    reset_failure: float = Field(default=0.0, ge=0, le=1)
    step_failure: float = Field(default=0.0, ge=0, le=1)
    """Per step."""
    success: float = Field(default=0.5, ge=0, le=1)
    """Share of episodes that end with reward 1; the others end with 0."""


class Workload:
    """A profile with its seed: the task as simulated workers see it."""

    def __init__(self, task: str, profile: TaskProfile, seed: int) -> None:
        self.profile = profile
        self.seed = mix(seed, stable_int(task))
        self.draw_prompt_tokens = profile.prompt_tokens.keyed()
        self.draw_observation_tokens = profile.observation_tokens.keyed()
        self.draw_turns = profile.turns.keyed()
        self.draw_reset_s = profile.reset_s.keyed()
        self.draw_step_s = profile.step_s.keyed()
        self._draw_answer_tokens = profile.answer_tokens.keyed()
        self._draw_reward_s = profile.reward_s.keyed()
        self._answers = mix(self.seed, _ANSWER)
        self._rewards = mix(self.seed, _REWARD)

    def answer_tokens(self, sampling_seed: int) -> int:
        """Untruncated length of a turn's answer. The controller derives the seed from prompt, member and turn."""
        return _count(self._draw_answer_tokens(self._answers, sampling_seed))

    def reward_s(self, prompt_seed: int, turns: int) -> float:
        """Latency of a reward call, which has no member; the number of turns stands in for it."""
        return self._draw_reward_s(mix(self._rewards, prompt_seed), turns)


@lru_cache(maxsize=64)
def shared_workload(task: str, profile: TaskProfile, seed: int) -> Workload:
    """One instance for all workers of this task: a thousand copies would not stay in the processor's cache."""
    return Workload(task, profile, seed)


def shared_workloads(profiles: Mapping[str, TaskProfile], seed: int) -> Mapping[str, Workload]:
    """Workloads by task; one table for all workers."""
    return _table(tuple(profiles.items()), seed)


@lru_cache(maxsize=64)
def _table(profiles: tuple[tuple[str, TaskProfile], ...], seed: int) -> Mapping[str, Workload]:
    return {task: shared_workload(task, profile, seed) for task, profile in profiles}


class Episode:
    """The script of one episode."""

    __slots__ = ("_key", "_prompt", "_workload", "turns")

    def __init__(self, workload: Workload, prompt_seed: int, member: int) -> None:
        self._workload = workload
        self._prompt = mix(workload.seed, prompt_seed)
        self._key = mix(self._prompt, member)
        self.turns = _count(workload.draw_turns(self._key, _TURNS))

    def prompt_tokens(self) -> int:
        """The same for all members, which share the prompt."""
        return _count(self._workload.draw_prompt_tokens(self._prompt, _PROMPT))

    def observation_tokens(self, turn: int) -> int:
        return _count(self._workload.draw_observation_tokens(self._key, turn * _STREAMS + _OBSERVATION))

    def reward(self) -> float:
        return 1.0 if uniform(self._key, _SUCCESS) < self._workload.profile.success else 0.0

    def reset_s(self) -> float:
        return self._workload.draw_reset_s(self._key, _LATENCY)

    def step_s(self, turn: int) -> float:
        return self._workload.draw_step_s(self._key, turn * _STREAMS + _LATENCY)

    def reset_fails(self) -> bool:
        share = self._workload.profile.reset_failure
        return share > 0 and uniform(self._key, _FAILURE) < share

    def step_fails(self, turn: int) -> bool:
        share = self._workload.profile.step_failure
        return share > 0 and uniform(self._key, turn * _STREAMS + _FAILURE) < share


def _count(value: float) -> int:
    return int(value + 0.5) if value >= 1.0 else 1
