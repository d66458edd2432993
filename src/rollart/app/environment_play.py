"""Episodes of any environment, played one call at a time with a limit, for `rollart env check`."""

import random
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rollart.backends.environments.shim.player import Player, failure
from rollart.backends.environments.sources import EnvironmentSource
from rollart.types.chat import readable
from rollart.types.errors import RollartError
from rollart.types.trajectory import Prompt

Answer = Callable[["Episode", Player], str]
"""The next answer of a player."""
_WORD = re.compile(r"\[[^\[\]\n]{1,20}\]|\w+")


class Turn(NamedTuple):
    """What the environment answered, and how long it took."""

    observation: str
    reward: float
    done: bool
    truncated: bool
    seconds: float

    @property
    def content(self) -> tuple[str, float, bool, bool]:
        return self[:4]


class Episode:
    """An episode so far. `failed` says how it broke, if it did; `hangs`, that a call did not return."""

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt
        self.turns: list[Turn] = []
        """The first is the answer to the reset."""
        self.answers: list[str] = []
        self.failed = ""
        self.hangs = False
        self.close_failure = ""

    @property
    def observations(self) -> list[str]:
        return [turn.observation for turn in self.turns]

    @property
    def reward(self) -> float:
        return sum(turn.reward for turn in self.turns)

    @property
    def done(self) -> bool:
        return bool(self.turns) and self.turns[-1].done

    @property
    def contents(self) -> list[tuple[str, float, bool, bool]]:
        return [turn.content for turn in self.turns]


class Table:
    """Plays episodes of one source."""

    def __init__(self, source: EnvironmentSource, max_turns: int, call_limit_s: float) -> None:
        self._source = source
        self._max_turns = max_turns
        self._call_limit_s = call_limit_s

    def play(self, prompt: Prompt, answer: Answer) -> Episode:
        """One episode. A call that exceeds the limit leaves its thread behind."""
        (episode,) = self.play_together([prompt], [answer])
        return episode

    def play_together(self, prompts: Sequence[Prompt], answers: Sequence[Answer]) -> list[Episode]:
        """One episode per prompt, all at the same time, each in a thread of its own."""
        episodes = [Episode(prompt) for prompt in prompts]
        threads = []
        for episode, answer in zip(episodes, answers, strict=True):
            progress = [time.monotonic()]
            thread = threading.Thread(target=self._play, args=(episode, answer, progress), daemon=True)
            thread.start()
            threads.append((episode, thread, progress))
        for episode, thread, progress in threads:
            while thread.is_alive():
                left_s = progress[0] + self._call_limit_s - time.monotonic()
                if left_s <= 0:
                    episode.hangs = True
                    what = "reset" if not episode.turns else f"step {len(episode.turns)}"
                    episode.failed = f"{what} did not return within {self._call_limit_s:g} s"
                    break
                thread.join(min(left_s, 1.0))
        return episodes

    def _play(self, episode: Episode, answer: Answer, progress: list[float]) -> None:
        player = Player(self._source.build)
        prompt = episode.prompt

        def timed(call: Callable[[], Any]) -> None:
            progress[0] = began = time.monotonic()
            observation, reward, done, truncated, *_ = call()
            progress[0] = ended = time.monotonic()
            episode.turns.append(Turn(readable(observation), reward, done, truncated, ended - began))

        try:
            plain = {"id": prompt.id, "task": prompt.task, "seed": prompt.seed, "data": prompt.data}
            timed(lambda: player.reset(plain))
            while not episode.done and len(episode.answers) < self._max_turns:
                said = answer(episode, player)
                episode.answers.append(said)
                timed(lambda said=said: player.step(said))  # type: ignore[misc]
        except RollartError as error:
            episode.failed = str(error) or type(error).__name__
        except BaseException as error:  # noqa: BLE001 - the boundary of user code: its errors are shown
            episode.failed = failure(error)[0]
        player.close()
        episode.close_failure = player.close_failure


def random_player(seed: int) -> Answer:
    """The environment's own random answers if it has some; else words, numbers and moves of what it shows."""
    chance = random.Random(seed)

    def answer(episode: Episode, player: Player) -> str:
        own = player.call("random_action", [chance.randrange(2**31)])
        if isinstance(own, str):
            return own
        seen = "\n".join([episode.observations[0], episode.observations[-1]])
        return str(chance.choice([*_WORD.findall(seen), *"0123456789"]))

    return answer


def scripted_player(script: Callable[[Sequence[str], random.Random], str], seed: int) -> Answer:
    """A script of the observations so far, as those of the built-in tasks."""
    chance = random.Random(seed)
    return lambda episode, _: script(episode.observations, chance)


class NoScript(Exception):
    """The environment knows no good answer."""


def own_script(episode: Episode, player: Player) -> str:  # noqa: ARG001 - the environment knows
    """The environment's own good answer."""
    answer = player.call("scripted_action", [])
    if not isinstance(answer, str):
        raise NoScript("the environment has no scripted player")
    return answer


def replay(answers: Sequence[str]) -> Answer:
    """The same answers again; then empty ones."""
    return lambda episode, _: answers[len(episode.answers)] if len(episode.answers) < len(answers) else ""
