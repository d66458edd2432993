"""Reward rules of a run, from its config and from what the functions say of themselves."""

from collections.abc import Callable, Mapping

from rollart.config.schema import RunConfig
from rollart.config.tasks import EPISODE_RETURN, RewardSettings
from rollart.types.rewards import RewardRule, is_plain

RewardPlans = Mapping[str, tuple[RewardRule, ...]]
"""The rewards of every task."""


def reward_plans(config: RunConfig, sees_group: Callable[[str, RewardSettings], bool]) -> RewardPlans:
    """The rewards of every task; `sees_group` says whether the function of one sees the whole group."""
    return {
        name: tuple(
            RewardRule(
                name=reward.label,
                weight=reward.weight,
                group=sees_group(name, reward),
                default=reward.default,
                deadline_s=reward.deadline_s or config.deadlines.reward_s,
                transcript=reward.function != EPISODE_RETURN,
            )
            for reward in task.all_rewards
        )
        for name, task in config.tasks.items()
    }


def listed(plans: RewardPlans) -> dict[str, tuple[RewardRule, ...]]:
    """The plans that a journal has to list to be checked: all but plain ones."""
    return {task: rules for task, rules in plans.items() if not is_plain(rules)}
