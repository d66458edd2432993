"""A claimed batch as an advantage function sees it: rewards, turns and states, no tokens."""

from collections.abc import Callable, Sequence

import msgspec

from rollart.types.ids import GroupId, TrajectoryId


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One trajectory of a group."""

    trajectory: TrajectoryId
    reward: float
    """Its final reward."""
    turn_rewards: tuple[float, ...]
    """Reward per turn; they add up to `reward`."""
    turn_tokens: tuple[int, ...]
    """Number of tokens that the agent sampled per turn."""
    states: tuple[bytes, ...] = ()
    """Key of the state that each turn started in; equal states have equal keys. Empty for built-in advantages that do
    not compare states."""
    masked: bool = False
    """It is past the staleness bound: it counts in baselines, and its tokens are not trained."""
    truncated: bool = False
    """A limit of the agent ended the episode."""

    @property
    def turns(self) -> int:
        return len(self.turn_rewards)


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """The trajectories of one prompt in a batch. Their number may differ from the configured group size."""

    id: GroupId
    task: str
    members: tuple[Member, ...]

    @property
    def rewards(self) -> list[float]:
        """Final rewards of the members.

        >>> member = Member(trajectory=TrajectoryId(1), reward=2.0, turn_rewards=(0.5, 1.5), turn_tokens=(3, 4))
        >>> Group(id=GroupId(1), task="math", members=(member, member)).rewards
        [2.0, 2.0]
        """
        return [member.reward for member in self.members]


Advantage = float | Sequence[float]
"""Advantage of one trajectory: a number for all of its tokens, or one per turn."""
Advantages = Sequence[Sequence[Advantage]]
"""Groups, members: in the order of the batch."""
AdvantageFunction = Callable[..., Advantages]
"""`function(batch: Sequence[Group], **settings) -> Advantages`."""
