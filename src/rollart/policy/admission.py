"""How much may be started: never more than can be claimed within the staleness bound.

Batches are claimed in order. With the engines at version v, what starts now has its first token at v and may be claimed
as long as the engines are at v + alpha or before. So at any time the groups that are open or ready must fit into the
batches that will be claimed until then:

    batches = v + 1 + (1 if training overlaps rollout) + (alpha if rollout is interrupted, not drained) - claims so far

Where rollout is drained, at most one batch is in the making. The buffer therefore holds O(alpha) batches whatever the
trainer does: a slow trainer holds rollout back, it never fills the memory.

    >>> from rollart.config.modes import MODES, Mode
    >>> [batches_in_the_making(MODES[mode], alpha=1, served=0, claims=0) for mode in Mode]
    [1, 1, 1, 3, 3]
    >>> [batches_in_the_making(MODES[mode], alpha=1, served=0, claims=1) for mode in Mode]
    [0, 0, 1, 2, 2]
"""

from collections.abc import Mapping

from rollart.config.modes import ModeSettings


def batches_in_the_making(mode: ModeSettings, *, alpha: int, served: int, claims: int) -> int:
    """How many batches may be open or ready; `served` is the step in service, `claims` the step to claim next."""
    ahead = served + 1 + int(mode.overlap) + (alpha if mode.interrupt else 0) - claims
    if not mode.interrupt:
        ahead = min(ahead, 1)
    return max(ahead, 0)


def groups_to_start(
    *,
    batches: int,
    current: Mapping[str, int],
    usual: Mapping[str, int],
    in_the_making: Mapping[str, int],
    extra: int,
) -> dict[str, int]:
    """How many groups of each task may be opened now.

    `current` is what the next batch needs of each task (its share, or more where it fills in for another), `usual` what
    later ones do, `in_the_making` the groups that are open or ready.
    """
    if batches <= 0:
        return dict.fromkeys(usual, 0)
    return {
        task: max(0, current[task] + (batches - 1) * share + extra - in_the_making.get(task, 0))
        for task, share in usual.items()
    }
