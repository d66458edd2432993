"""Credit: a claimed batch of trajectories as samples for the trainer, every turn with its advantage.

Baselines are taken over whole groups, or over the whole batch, masked members included. The rewards of a trajectory's
turns add up to its reward. With `gae` the trainer computes the advantages, because it has the values.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from rollart.algo.advantage import dr_grpo, gigpo, grpo, reinforce_plus_plus, rloo, zero_variance
from rollart.config.algorithm import AdvantageKind, AlgorithmSettings
from rollart.types.errors import InvariantBroken
from rollart.types.trajectory import TrainSample, Trajectory, Turn

Group = Sequence[Trajectory]
NO_SIGNAL = "no signal: all rewards are equal"

_OF_A_GROUP: dict[AdvantageKind, Callable[[Sequence[float]], list[float]]] = {
    AdvantageKind.GRPO: grpo,
    AdvantageKind.DR_GRPO: dr_grpo,
    AdvantageKind.RLOO: rloo,
}


def samples(settings: AlgorithmSettings, groups: Sequence[Group]) -> list[TrainSample]:
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
        for group, advantages in zip(groups, _per_turn(settings, groups), strict=True)
        for member, turns in zip(group, advantages, strict=True)
    ]


def has_no_signal(group: Group) -> str | None:
    """The reason to filter a complete group out, if there is one (dynamic sampling)."""
    return NO_SIGNAL if zero_variance([reward_of(member) for member in group]) else None


def keeps_states(settings: AlgorithmSettings) -> bool:
    """Whether trajectories have to remember which state each of their turns started in."""
    return settings.advantage is AdvantageKind.GIGPO


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


def _per_turn(settings: AlgorithmSettings, groups: Sequence[Group]) -> list[list[list[float]]]:
    """Groups, members, turns."""
    if settings.advantage is AdvantageKind.GIGPO:
        return [_by_state(settings, group) for group in groups]
    return [
        [[advantage] * member.turns for member, advantage in zip(group, advantages, strict=True)]
        for group, advantages in zip(groups, _per_trajectory(settings, groups), strict=True)
    ]


def _per_trajectory(settings: AlgorithmSettings, groups: Sequence[Group]) -> list[list[float]]:
    rewards = [[reward_of(member) for member in group] for group in groups]
    match settings.advantage:
        case AdvantageKind.GAE:
            return [[0.0] * len(group) for group in groups]
        case AdvantageKind.REINFORCE_PLUS_PLUS:
            return reinforce_plus_plus(rewards, group_baseline=bool(settings.group_baseline))
        case kind:
            return [_OF_A_GROUP[kind](group) for group in rewards]


def _by_state(settings: AlgorithmSettings, group: Group) -> list[list[float]]:
    chosen: dict[str, Any] = {name: getattr(settings, name) for name in ("step_weight", "discount", "normalise")}
    return gigpo(
        [_states(member) for member in group],
        [turn_rewards(member) for member in group],
        **{name: value for name, value in chosen.items() if value is not None},
    )


def _states(trajectory: Trajectory) -> list[bytes]:
    if trajectory.states is None:
        raise InvariantBroken(f"trajectory {trajectory.id} was started without a memory for its states")
    return trajectory.states.first(trajectory.turns)
