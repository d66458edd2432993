"""Credit: a claimed batch of trajectories as samples for the trainer, every turn with its advantage.

Baselines are taken over whole groups, or over the whole batch, masked members included. The rewards of a trajectory's
turns add up to its reward. With `gae` the trainer computes the advantages, because it has the values.
"""

import math
from collections.abc import Sequence

from rollart.algo.advantage import zero_variance
from rollart.config.algorithm import AdvantageKind, AlgorithmSettings
from rollart.ports.advantage import Estimator
from rollart.types import credit
from rollart.types.errors import InvariantBroken
from rollart.types.trajectory import TrainSample, Trajectory, Turn

Group = Sequence[Trajectory]
NO_SIGNAL = "no signal: all rewards are equal"


def samples(advantage: Estimator, groups: Sequence[Group]) -> list[TrainSample]:
    """The groups of one batch, member by member."""
    return [
        TrainSample(
            trajectory=member.id,
            group=member.group,
            task=member.task,
            sequences=tuple(member.sequences),
            turns=tuple(
                Turn(tokens, advantage, reward)
                for tokens, advantage, reward in zip(member.turn_tokens, turns, turn_rewards(member), strict=True)
            ),
            reward=reward_of(member),
            masked=member.masked,
            truncated=member.truncated,
        )
        for group, advantages in zip(groups, advantage.per_turn([_shown(group) for group in groups]), strict=True)
        for member, turns in zip(group, advantages, strict=True)
    ]


def has_no_signal(group: Group) -> str | None:
    """The reason to filter a complete group out, if there is one (dynamic sampling)."""
    return NO_SIGNAL if zero_variance([reward_of(member) for member in group]) else None


def keeps_states(settings: AlgorithmSettings) -> bool:
    """Whether trajectories record the state at the start of every turn; always for user-defined advantages."""
    return settings.advantage is AdvantageKind.GIGPO or not isinstance(settings.advantage, AdvantageKind)


def reward_of(trajectory: Trajectory) -> float:
    if trajectory.reward is None:
        raise InvariantBroken(f"trajectory {trajectory.id} without a reward reached a batch")
    return trajectory.reward


def turn_rewards(trajectory: Trajectory) -> list[float]:
    """Reward per turn. The last turn gets what the final reward adds to the rewards of the environment."""
    rewards = list(trajectory.turn_rewards)
    if rewards:
        rewards[-1] += reward_of(trajectory) - math.fsum(rewards)
    return rewards


def _shown(group: Group) -> credit.Group:
    """What the advantage function sees of a group."""
    return credit.Group(
        id=group[0].group,
        task=group[0].task,
        members=tuple(
            credit.Member(
                trajectory=member.id,
                reward=reward_of(member),
                turn_rewards=tuple(turn_rewards(member)),
                turn_tokens=tuple(member.turn_tokens),
                states=() if member.states is None else tuple(member.states.first(member.turns)),
                masked=member.masked,
                truncated=member.truncated,
            )
            for member in group
        ),
    )
