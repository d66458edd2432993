"""Scorer: a reward function as reward workers and `rollart reward try` call it, on episodes of the controller."""

from collections.abc import Iterable

from rollart.config.schema import EPISODE_RETURN
from rollart.ports.reward_call import BadReward, RewardCaller, Rewards
from rollart.types.ids import PromptId
from rollart.types.messages import EpisodeRecord
from rollart.types.transcript import Transcript, TranscriptTurn, unpack

__all__ = ["BadReward", "Rewards", "Scorer"]


class Scorer(RewardCaller):
    """One reward function; thread-safe as far as the function is."""

    def transcripts(self, episodes: Iterable[EpisodeRecord]) -> list[Transcript]:
        """What the function sees of these episodes."""
        if self.path == EPISODE_RETURN:
            return [_rewards_only(episode) for episode in episodes]
        return [unpack(episode.transcript) for episode in episodes]


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
