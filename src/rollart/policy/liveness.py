"""Upper bound on the duration of a step, stated at the start of a run and checked against its journal.

From one trained step to the next the trainer loop waits for these in turn, each with its own deadline:

    publish ─► save ─► rollout drained of evaluation ─► shares filled ─► engines updated ─► train

The bound is their sum, so it holds whatever fails as long as the trainer lives: at a deadline a worker is replaced, a
share is redistributed, or the run stops and reports the cause. Losing the trainer restarts the clock; the health policy
bounds how often that happens.
"""

import math

from rollart.config.schema import RunConfig
from rollart.policy.health import REWARD

EVAL_ATTEMPTS = 5
"""Attempts of a held-out group of size one before it is hopeless (`policy.groups`)."""


def episode_bound_s(config: RunConfig, task: str) -> float:
    """Maximum duration of one episode, reward included, given the deadlines of its parts."""
    settings, deadlines = config.tasks[task], config.deadlines
    return (
        settings.reset_deadline_s
        + settings.max_turns * (deadlines.turn_s + settings.step_deadline_s)
        + rewards_bound_s(config, task)
    )


def reward_bound_s(attempt_s: float) -> float:
    """Maximum duration of one reward: its attempts, the back-off between them and the wait for a free worker."""
    return REWARD.failures * (attempt_s + REWARD.backoff.max_s)


def rewards_bound_s(config: RunConfig, task: str) -> float:
    """Maximum duration of all rewards of a trajectory: its own at the same time, then those of its group."""
    rewards = config.tasks[task].all_rewards
    slowest_s = max(reward_bound_s(reward.deadline_s or config.deadlines.reward_s) for reward in rewards)
    return slowest_s * min(2, len(rewards))


def sync_bound_s(config: RunConfig) -> float:
    """Maximum duration of one phase of a sync: a late engine is replaced once, and the new one gets the full time."""
    deadlines = config.deadlines
    return 2 * (deadlines.stage_s + deadlines.update_s + deadlines.model_loads_s)


def shares_bound_s(config: RunConfig) -> float:
    """Maximum time until a batch is complete.

    Every redistribution makes one task give up for good and restarts the deadline of the tasks that fill in. In the
    worst case the slowest task fills its share at the last moment and then fills in for every other task in turn.
    Filtered groups change nothing: they count as incomplete, and a task with no other groups does not fill its share.
    """
    return len(config.tasks) * max(task.share_deadline_s for task in config.tasks.values())


def step_bound_s(config: RunConfig) -> float:
    """Maximum time from one trained step, or the start of a trainer, to the next; see the module."""
    deadlines = config.deadlines
    return (
        deadlines.publish_s
        + deadlines.save_s
        + _evaluation_bound_s(config)
        + shares_bound_s(config)
        # A claim waits for group rewards of groups at their last chance.
        + max(_group_rewards_bound_s(config, task) for task in config.tasks)
        # Two phases: every engine staged, every engine updated.
        + 2 * sync_bound_s(config)
        + deadlines.train_s
    )


def _group_rewards_bound_s(config: RunConfig, task: str) -> float:
    """0 for tasks without a `rewards` list: their claims never wait for group rewards."""
    return rewards_bound_s(config, task) if config.tasks[task].rewards else 0.0


def eval_concurrency(config: RunConfig, task: str, *, alone: bool) -> int:
    """Concurrent held-out episodes of a task: all its environments, or a quarter if training continues beside them."""
    environments = config.tasks[task].environments
    return environments if alone else max(1, environments // 4)


def _evaluation_bound_s(config: RunConfig) -> float:
    """Maximum duration of an evaluation: rounds of held-out episodes, each prompt with its retries.

    If rollout drains at an update, all episodes end first; otherwise only those before the first step delay it.
    """
    if not config.eval_every:
        return 0.0
    alone = config.mode_settings.interrupt
    rounds = {
        task: math.ceil(settings.eval_episodes * settings.eval_samples / eval_concurrency(config, task, alone=alone))
        for task, settings in config.tasks.items()
    }
    return max(EVAL_ATTEMPTS * rounds[task] * episode_bound_s(config, task) for task in config.tasks)
