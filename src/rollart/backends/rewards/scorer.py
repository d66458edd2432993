"""Scorer: a reward function as reward workers and `rollart reward try` call it, on episodes of the controller."""

import asyncio
from collections.abc import Iterable

from rollart.config.tasks import EPISODE_RETURN
from rollart.ports.reward_call import BadReward, RewardCaller, shown
from rollart.types.errors import WRONG_CODE
from rollart.types.ids import PromptId
from rollart.types.messages import EpisodeRecord, Scored, ScoreFailed, ScoreRequest
from rollart.types.transcript import Transcript, TranscriptTurn, unpack

__all__ = ["BadReward", "Scorer", "transcripts_of", "unreadable"]


class Scorer(RewardCaller):
    """One reward function; thread-safe as far as the function is."""

    def answer(self, request: ScoreRequest, runner: asyncio.Runner | None = None) -> Scored | ScoreFailed:
        """Compute a reward. Whatever the function does, its result is an answer."""
        try:
            transcripts = transcripts_of(self.path, request.episodes)
        except ValueError as error:
            return unreadable(request, error)
        try:
            rewards = self.score(transcripts, runner)
        except BadReward as error:
            return ScoreFailed(request.key, shown(error), retry=False)
        except BaseException as error:  # noqa: BLE001 - the boundary of user code: its errors are attributed to it
            retry = not isinstance(error, WRONG_CODE)
            return ScoreFailed(request.key, f"{type(error).__name__}: {shown(error)}", retry)
        return Scored(request.key, rewards.values, rewards.parts)


def transcripts_of(function: str, episodes: Iterable[EpisodeRecord]) -> list[Transcript]:
    """What the function with this path sees of these episodes; `ValueError` if a transcript cannot be read."""
    if function == EPISODE_RETURN:
        return [_rewards_only(episode) for episode in episodes]
    return [unpack(episode.transcript) for episode in episodes]


def unreadable(request: ScoreRequest, error: ValueError) -> ScoreFailed:
    """The answer where a transcript was not made, cut off or damaged on its way: asking again would send the same."""
    return ScoreFailed(request.key, f"a transcript cannot be read: {error}", retry=False)


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
