"""Scripted players: they play a task through its environment host, so their tokens are those of a rollout.

    def player(observations: Sequence[str], chance: random.Random) -> str:
        return "A 42" if "6*7" in observations[-1] else "C " + observations[-1]

A player sees what an agent sees, the observations so far, and returns the next answer. Invariants:
- The same task, prompts and seed give the same episodes, as far as the environment is deterministic. Every episode has
  a `chance` of its own, also where a prompt is played again.
- An episode that its environment fails is a value, `Failed`; only what would fail again ends the playing.
"""

import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from rollart.app.compose import codec_factory, hosted
from rollart.backends.environments.watched import WatchedHost
from rollart.backends.rewards.scorer import Scorer
from rollart.config.schema import RunConfig
from rollart.config.tasks import EPISODE_RETURN, RewardSettings, TaskSettings
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
    """One episode: token by token, as a transcript, and its reward, if a reward is asked for."""

    sequences: list[Turns]
    transcript: Transcript
    reward: float | None


class Failed(NamedTuple):
    """An episode that its environment could not finish."""

    reason: str


class PlayedTask:
    """The environments of one task, for one player at a time; a context manager.

    Rewards are computed for `sft.min_reward` only.
    """

    def __init__(self, config: RunConfig, task: str, answer: Callable[[str], list[int]]) -> None:
        codec, codec_settings = codec_factory(config)
        self._task, self._settings = task, config.tasks[task]
        self._answer = answer
        self._woken = threading.Event()
        self._seen: list[str] = []
        self._episodes = 0
        self._scorers = _scorers(task, self._settings) if config.sft.min_reward is not None else None
        self._scoring = ThreadPoolExecutor(1)
        """Rewards may be async, and the caller's thread may run an event loop: that of a notebook."""
        settings = {
            "task": task,
            "settings": hosted(self._settings).model_copy(update={"inject": ()}),
            "codec": codec,
            "codec_settings": codec_settings,
            "slots": 1,
            "transcripts": True,
        }
        self._host = WatchedHost(settings, self._woken.set, self._observe)

    def __enter__(self) -> "PlayedTask":
        return self

    def __exit__(self, *_: object) -> None:
        self._host.close()
        self._scoring.shutdown()

    def play(self, prompt: Prompt, player: Player, seed: int) -> Played | Failed:
        """Play one episode, up to its end or a limit of the task."""
        self._episodes += 1
        chance = random.Random(f"{seed}/{prompt.task}/{prompt.id}/{self._episodes}")
        episode = TrajectoryId(self._episodes)
        self._seen.clear()
        sequences: list[Turns] = [[]]
        earned = 0.0
        observed = self._ask(Reset(episode, 0, prompt, 0), self._settings.reset_deadline_s)
        while isinstance(observed, Observed) and not observed.transcript:
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
            earned += observed.reward if isinstance(observed, Observed) else 0.0
        self._host.post([Close(episode)])
        if isinstance(observed, Failed):
            return observed
        transcript = unpack(observed.transcript)
        return Played([each for each in sequences if each], transcript, self._reward(transcript, earned))

    def _observe(self, step: TextStep) -> None:
        self._seen.append(readable(step.observation))

    def _ask(self, command: Reset | Step, limit_s: float) -> Observed | Failed:
        self._host.post([command])
        deadline = time.monotonic() + limit_s
        while True:
            self._woken.clear()
            for event in self._host.advance(0.0).events:
                if isinstance(event, EnvironmentFailed):
                    if event.permanent:
                        raise TaskBroken(f"an environment of {self._task} failed: {event.reason}")
                    return Failed(event.reason)
                assert isinstance(event, Observed)
                return event
            if not self._woken.wait(max(0.0, deadline - time.monotonic())):
                raise TaskBroken(f"an environment of {self._task} did not answer within {limit_s:g} s")

    def _reward(self, transcript: Transcript, earned: float) -> float | None:
        """The weighted sum of the task's rewards, as in a run; rewards of whole groups are left out."""
        if self._scorers is None:
            return None
        return sum(
            reward.weight * (earned if scorer is None else self._score(reward, scorer, transcript))
            for reward, scorer in self._scorers
        )

    def _score(self, reward: RewardSettings, scorer: Scorer, transcript: Transcript) -> float:
        try:
            return self._scoring.submit(scorer.score, [transcript]).result().values[0]
        except Exception as error:  # the boundary of user code: its errors are attributed to it
            if reward.default is not None:
                return reward.default
            reason = f"{type(error).__name__}: {error}"
            raise TaskBroken(f"the reward {reward.label} of {self._task} failed: {reason}") from error


def _scorers(task: str, settings: TaskSettings) -> list[tuple[RewardSettings, Scorer | None]]:
    """The rewards of single episodes; None is what the environment gave."""
    found: list[tuple[RewardSettings, Scorer | None]] = []
    for reward in settings.all_rewards:
        if not reward.function:
            raise RequestError(
                f"the reward {reward.label or reward.run} of {task} is behind a URL, and sft.min_reward needs its "
                "function; name it besides, as `function`"
            )
        scorer = None if reward.function == EPISODE_RETURN else Scorer(reward.function)
        if scorer is None or scorer.kind is not RewardKind.GROUP:
            found.append((reward, scorer))
    return found
