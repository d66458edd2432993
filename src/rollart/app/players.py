"""Scripted players: they play a task through its environment host, so their tokens are those of a rollout.

    def player(observations: Sequence[str], chance: random.Random) -> str:
        return "A 42" if "6*7" in observations[-1] else "C " + observations[-1]

A player sees what an agent sees, the observations so far, and returns the next answer. Invariant: the same task,
prompts and seed give the same episodes, as far as the environment is deterministic.
"""

import asyncio
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rollart.app.compose import codec_factory
from rollart.backends.environments.watched import WatchedHost
from rollart.backends.rewards.scorer import BadReward, Scorer
from rollart.config.schema import RunConfig
from rollart.config.tasks import EPISODE_RETURN
from rollart.ports.environment import TextStep
from rollart.ports.reward import RewardKind
from rollart.types.chat import readable
from rollart.types.errors import RequestError, TaskBroken
from rollart.types.ids import TrajectoryId
from rollart.types.messages import Close, EnvironmentFailed, Observed, Reset, Step
from rollart.types.tokens import Segment
from rollart.types.trajectory import Prompt
from rollart.types.transcript import Transcript, unpack

Player = Callable[[Sequence[str], random.Random], str]
Turns = list[tuple[list[int], list[int]]]


class Played(NamedTuple):
    """One episode: token by token, as a transcript, and its reward."""

    sequences: list[Turns]
    transcript: Transcript
    reward: float


class Stage:
    """The environments of one task, for one player at a time; a context manager."""

    def __init__(self, config: RunConfig, task: str, answer: Callable[[str], list[int]]) -> None:
        codec, codec_settings = codec_factory(config)
        self._task, self._settings = task, config.tasks[task]
        self._answer = answer
        self._woken = threading.Event()
        self._seen: list[str] = []
        self._episodes = 0
        settings = {
            "task": task,
            "settings": self._settings.model_copy(update={"inject": ()}),
            "codec": codec,
            "codec_settings": codec_settings,
            "slots": 1,
            "transcripts": True,
        }
        self._host = WatchedHost(settings, self._woken.set, self._observe)

    def __enter__(self) -> "Stage":
        return self

    def __exit__(self, *_: object) -> None:
        self._host.close()

    def play(self, prompt: Prompt, player: Player, seed: int) -> Played:
        """Play one episode, up to its end or a limit of the task."""
        chance = random.Random(f"{seed}/{prompt.task}/{prompt.id}")
        self._episodes += 1
        episode = TrajectoryId(self._episodes)
        self._seen.clear()
        sequences: list[Turns] = [[]]
        earned = 0.0
        observed = self._ask(Reset(episode, 0, prompt, 0), self._settings.reset_deadline_s)
        while not observed.transcript:
            if observed.new_sequence:
                sequences.append([])
            said: object = player(list(self._seen), chance)
            if not isinstance(said, str):
                raise RequestError(f"the player returned a {type(said).__name__}; it must return the answer as text")
            tokens = self._answer(said)
            if len(tokens) > self._settings.max_turn_tokens:
                raise RequestError(
                    f"the player's answer {said[:80]!r} has {len(tokens)} tokens, and an agent may say "
                    f"{self._settings.max_turn_tokens} in a turn; raise tasks.{self._task}.max_turn_tokens"
                )
            sequences[-1].append((observed.observation.ids().tolist(), tokens))
            turn = Step(episode, observed.turn + 1, Segment.of(tokens))
            observed = self._ask(turn, self._settings.step_deadline_s)
            earned += observed.reward
        self._host.post([Close(episode)])
        transcript = unpack(observed.transcript)
        return Played([each for each in sequences if each], transcript, self._reward(transcript, earned))

    def _observe(self, step: TextStep) -> None:
        self._seen.append(readable(step.observation))

    def _ask(self, command: Reset | Step, limit_s: float) -> Observed:
        self._host.post([command])
        deadline = time.monotonic() + limit_s
        while True:
            self._woken.clear()
            for event in self._host.advance(0.0).events:
                if isinstance(event, EnvironmentFailed):
                    raise TaskBroken(f"an environment of {self._task} failed: {event.reason}")
                assert isinstance(event, Observed)
                return event
            if not self._woken.wait(max(0.0, deadline - time.monotonic())):
                raise TaskBroken(f"an environment of {self._task} did not answer within {limit_s:g} s")

    def _reward(self, transcript: Transcript, earned: float) -> float:
        """The weighted sum of the task's rewards, as in a run; rewards of whole groups are left out."""
        total = 0.0
        for reward in self._settings.all_rewards:
            if reward.function == EPISODE_RETURN:
                total += reward.weight * earned
                continue
            scorer = Scorer(reward.function)
            if scorer.kind is RewardKind.GROUP:
                continue
            try:
                with asyncio.Runner() as runner:
                    total += reward.weight * scorer.score([transcript], runner).values[0]
            except BadReward as error:
                raise TaskBroken(f"the reward {reward.label} of {self._task}: {error}") from error
        return total
