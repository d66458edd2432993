"""Built-in advantage functions, behind the same interface as those of users; the formulas are in `advantage`.

Each takes the groups of a batch and its settings as keywords, and returns one advantage per trajectory, or a list with
one per turn. `config.algorithm.ADVANTAGES` has their names.
"""

from collections.abc import Sequence

from rollart.algo import advantage as formulas
from rollart.types.credit import Advantages, Group


def grpo(batch: Sequence[Group]) -> Advantages:
    """Mean of the group, divided by the standard deviation of the group."""
    return [formulas.grpo(group.rewards) for group in batch]


def dr_grpo(batch: Sequence[Group]) -> Advantages:
    """Mean of the group."""
    return [formulas.dr_grpo(group.rewards) for group in batch]


def rloo(batch: Sequence[Group]) -> Advantages:
    """Mean of the other members of the group."""
    return [formulas.rloo(group.rewards) for group in batch]


def reinforce_plus_plus(batch: Sequence[Group], *, group_baseline: bool = False) -> Advantages:
    """Mean of the batch, divided by the standard deviation of the batch."""
    return formulas.reinforce_plus_plus([group.rewards for group in batch], group_baseline=group_baseline)


def gigpo(
    batch: Sequence[Group], *, step_weight: float = 1.0, discount: float = 0.95, normalise: bool = True
) -> Advantages:
    """Per turn: mean of the group, and of the group's turns that start in the same state."""
    return [
        formulas.gigpo(
            [member.states for member in group.members],
            [member.turn_rewards for member in group.members],
            step_weight=step_weight,
            discount=discount,
            normalise=normalise,
        )
        for group in batch
    ]


def learned_value(batch: Sequence[Group]) -> Advantages:
    """Zeros (`gae`): the trainer computes the advantages, because it has the values."""
    return [[0.0] * len(group.members) for group in batch]
