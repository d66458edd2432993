"""Scorer: a reward function with its kind, called on transcripts, its result checked.

Invariant: a result is one finite number per transcript, as floats, or `BadReward`. Shared by reward workers and by
`rollart reward try`, so both judge a result in the same way.
"""

import asyncio
import inspect
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rollart.config.schema import EPISODE_RETURN
from rollart.ports.factory import load
from rollart.ports.reward import RewardKind, kind_of
from rollart.types.errors import WRONG_CODE
from rollart.types.ids import PromptId
from rollart.types.messages import EpisodeRecord, Scored, ScoreFailed, ScoreRequest
from rollart.types.transcript import Transcript, TranscriptTurn, unpack


class BadReward(Exception):
    """The function returned something that is not a reward; it would again."""


class Rewards(NamedTuple):
    """A value per transcript, and its named parts if the function gives them."""

    values: tuple[float, ...]
    parts: tuple[dict[str, float], ...] = ()


class Scorer:
    """One reward function; thread-safe as far as the function is."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._function = load(path)
        self.kind = kind_of(self._function, path)

    def answer(self, request: ScoreRequest, runner: asyncio.Runner | None = None) -> Scored | ScoreFailed:
        """Compute a reward. Whatever the function does, its result is an answer."""
        try:
            transcripts = transcripts_of(self._path, request.episodes)
        except ValueError as error:
            return unreadable(request, error)
        try:
            rewards = self.score(transcripts, runner)
        except BadReward as error:
            return ScoreFailed(request.key, str(error), retry=False)
        except BaseException as error:  # noqa: BLE001 - the boundary of user code: its errors are attributed to it
            retry = not isinstance(error, WRONG_CODE)
            return ScoreFailed(request.key, f"{type(error).__name__}: {error}", retry)
        return Scored(request.key, rewards.values, rewards.parts)

    def score(self, transcripts: Sequence[Transcript], runner: asyncio.Runner | None = None) -> Rewards:
        """Call the function. `runner` runs what it awaits, a fresh one by default."""
        result: Any = self._function(list(transcripts) if self.kind is RewardKind.GROUP else transcripts[0])
        if inspect.isawaitable(result):
            if runner is None:
                with asyncio.Runner() as fresh:
                    result = fresh.run(_awaited(result))
            else:
                result = runner.run(_awaited(result))
        if self.kind is RewardKind.GROUP:
            return self._of_group(result, len(transcripts))
        if isinstance(result, Mapping):
            return self._of_parts(result)
        return Rewards((self._number(result),))

    def _of_group(self, result: Any, members: int) -> Rewards:
        if isinstance(result, str | bytes | Mapping) or not hasattr(result, "__len__"):
            raise BadReward(f"the reward function {self._path} returned {result!r}; it must be a list of numbers")
        if len(result) != members:
            raise BadReward(
                f"the reward function {self._path} returned {len(result)} numbers for {members} transcripts"
            )
        return Rewards(tuple([self._number(value) for value in result]))

    def _of_parts(self, result: Mapping[Any, Any]) -> Rewards:
        if not result:
            raise BadReward(f"the reward function {self._path} returned no part; a dict names at least one")
        for name in result:
            if not isinstance(name, str):
                raise BadReward(f"the reward function {self._path} returned a part named {name!r}; names are text")
        parts = {name: self._number(value) for name, value in result.items()}
        return Rewards((self._number(math.fsum(parts.values())),), (parts,))

    def _number(self, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
            raise BadReward(f"the reward function {self._path} returned {value!r}; it must be a finite number")
        return float(value)


def transcripts_of(function: str, episodes: Iterable[EpisodeRecord]) -> list[Transcript]:
    """What the function with this path sees of these episodes; `ValueError` if a transcript cannot be read."""
    if function == EPISODE_RETURN:
        return [_rewards_only(episode) for episode in episodes]
    return [unpack(episode.transcript) for episode in episodes]


def unreadable(request: ScoreRequest, error: ValueError) -> ScoreFailed:
    """The answer where a transcript was not made, cut off or damaged on its way: asking again would send the same."""
    return ScoreFailed(request.key, f"a transcript cannot be read: {error}", retry=False)


async def _awaited(result: Any) -> Any:
    return await result


def _rewards_only(episode: EpisodeRecord) -> Transcript:
    """What is known without a transcript."""
    return Transcript(
        task="",
        trajectory=episode.trajectory,
        prompt_id=PromptId(""),
        seed=episode.seed,
        member=0,
        turns=tuple([TranscriptTurn("", "", reward) for reward in episode.turn_rewards]),
    )
