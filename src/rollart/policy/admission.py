"""Admission control: never start more than can be claimed within the staleness bound.

Batches are claimed in order. While the engines serve version v, a trajectory that starts now gets its first token at v
and may be claimed until the engines pass v + alpha. So at any time the open and ready groups must fit into the batches
that will be claimed until then:

    batches = v + 1 + (1 if training overlaps rollout) + (alpha if rollout is interrupted, not drained) - claims so far

If rollout is drained, at most one batch is in progress. The buffer therefore holds O(alpha) batches however slow the
trainer is: a slow trainer throttles rollout instead of filling the memory.

    >>> from rollart.config.modes import MODES, Mode
    >>> [batches_in_the_making(MODES[mode], alpha=1, served=0, claims=0) for mode in Mode]
    [1, 1, 1, 3, 3]
    >>> [batches_in_the_making(MODES[mode], alpha=1, served=0, claims=1) for mode in Mode]
    [0, 0, 1, 2, 2]
"""

from collections.abc import Mapping

from rollart.config.modes import ModeSettings


def batches_in_the_making(mode: ModeSettings, *, alpha: int, served: int, claims: int) -> int:
    """Number of batches that may be open or ready; `served` is the step in service, `claims` the next step to claim."""
    ahead = served + 1 + int(mode.overlap) + (alpha if mode.interrupt else 0) - claims
    if not mode.interrupt:
        ahead = min(ahead, 1)
    return max(ahead, 0)


def groups_to_start(
    *,
    batches: Mapping[str, int],
    current: Mapping[str, int],
    usual: Mapping[str, int],
    in_the_making: Mapping[str, int],
    extra: int,
) -> dict[str, int]:
    """Number of groups of each task to open now.

    `batches` are those that may be in the making, `current` is what the next batch needs of each task (its share, or
    more if it fills in for another task), `usual` what later batches need, and `in_the_making` the number of groups
    that are open or ready.
    """
    return {
        task: max(0, current[task] + (batches[task] - 1) * share + extra - in_the_making.get(task, 0))
        if batches[task] > 0
        else 0
        for task, share in usual.items()
    }
