"""How long a step may take: the bound that a run states when it starts, and that its journal is held to.

From one trained step to the next the trainer loop waits for these in turn, each with a deadline of its own:

    publish ─► save ─► rollout drained of evaluation ─► shares filled ─► engines updated ─► train

The bound is their sum, so it holds whatever fails, as long as the trainer lives: at a deadline somebody is replaced,
a share is redistributed, or the run stops and says why. A trainer that is lost starts the clock again, and the health
policy bounds how often.
"""

import math

from rollart.config.schema import RunConfig
from rollart.policy.health import REWARD

EVAL_ATTEMPTS = 5
"""Members that a held-out group of one has before it is hopeless (`policy.groups`)."""


def episode_bound_s(config: RunConfig, task: str) -> float:
    """How long the deadlines of its parts let one episode take, its reward included."""
    settings, deadlines = config.tasks[task], config.deadlines
    return (
        settings.reset_deadline_s
        + settings.max_turns * (deadlines.turn_s + settings.step_deadline_s)
        + REWARD.failures * (deadlines.reward_s + REWARD.backoff.max_s)
    )


def sync_bound_s(config: RunConfig) -> float:
    """How long engines may take for one part of a sync: who is late is replaced once, and the new one has its time."""
    deadlines = config.deadlines
    return 2 * (deadlines.stage_s + deadlines.update_s + deadlines.engine_joins_s)


def shares_bound_s(config: RunConfig) -> float:
    """How long a batch may wait to be whole.

    Whenever a share changes hands a task gives up for good, and who fills in has its time again. So the slowest task
    may fill its share at the last moment, and fill in for every other one in turn. Groups that are filtered change
    nothing: they are as if they had not been complete, and a task that has no others left is one that fills no share.
    """
    return len(config.tasks) * max(task.share_deadline_s for task in config.tasks.values())


def step_bound_s(config: RunConfig) -> float:
    """The longest time from one trained step, or the start of a trainer, to the next; see the module."""
    deadlines = config.deadlines
    return (
        deadlines.publish_s
        + (deadlines.save_s if config.checkpoint_every else 0.0)
        + _evaluation_bound_s(config)
        + shares_bound_s(config)
        # Two parts: every engine staged, every engine updated.
        + 2 * sync_bound_s(config)
        + deadlines.train_s
    )


def eval_concurrency(config: RunConfig, task: str, *, alone: bool) -> int:
    """Held-out episodes of a task at once: all its environments, or a quarter where training is to go on beside."""
    environments = config.tasks[task].environments
    return environments if alone else max(1, environments // 4)


def _evaluation_bound_s(config: RunConfig) -> float:
    """Held-out episodes in so many rounds, each prompt retried.

    Where rollout drains at an update, all end first; elsewhere only those before the first step hold it up.
    """
    if not config.eval_every:
        return 0.0
    alone = config.mode_settings.interrupt
    rounds = {
        task: math.ceil(settings.eval_episodes / eval_concurrency(config, task, alone=alone))
        for task, settings in config.tasks.items()
    }
    return max(EVAL_ATTEMPTS * rounds[task] * episode_bound_s(config, task) for task in config.tasks)
