"""Rewards of a task by name, and the sheet on which those of one trajectory are entered.

The reward of a trajectory is the weighted sum of the rewards of its task. Each is entered exactly once, by a function
that sees the trajectory alone or by one that sees its whole group.

    >>> rules = (RewardRule("correct"), RewardRule("best", weight=0.5, group=True))
    >>> sheet = RewardSheet(rules)
    >>> sheet.enter("correct", 1.0)
    >>> sheet.missing(group=True)
    ['best']
    >>> sheet.enter("best", -1.0)
    >>> sheet.total()
    0.5
"""

import math
from collections.abc import Mapping, Sequence

import msgspec

from rollart.types.errors import InvariantBroken


class RewardRule(msgspec.Struct, frozen=True, omit_defaults=True):
    """One reward of a task."""

    name: str
    weight: float = 1.0
    group: bool = False
    """Its function sees all members of a group at once."""
    default: float | None = None
    """Its value where it fails for good; None = the trajectory ends as `reward_failed`."""
    deadline_s: float = 120.0
    """Limit of one attempt."""
    transcript: bool = True
    """Its function reads the transcript; False for those that need the turns' rewards only."""


def is_plain(rules: Sequence[RewardRule]) -> bool:
    """Whether the reward is a single number of a single function: nothing to add up, default or compare."""
    return len(rules) == 1 and not rules[0].group and rules[0].weight == 1.0 and rules[0].default is None


def total(rules: Sequence[RewardRule], values: Mapping[str, float]) -> float:
    """Weighted sum of the values, which may be infinite or NaN if it overflows."""
    try:
        return math.fsum(rule.weight * values[rule.name] for rule in rules)
    except (OverflowError, ValueError):
        return math.nan


class RewardSheet:
    """The rewards of one trajectory: each is entered once."""

    __slots__ = ("_rules", "defaulted", "values")

    def __init__(self, rules: Sequence[RewardRule]) -> None:
        self._rules = rules
        self.values: dict[str, float] = {}
        self.defaulted: list[str] = []
        """Rewards that failed and have their default."""

    def enter(self, name: str, value: float, *, defaulted: bool = False) -> None:
        if name in self.values or all(rule.name != name for rule in self._rules):
            raise InvariantBroken(f"reward {name!r} was entered twice, or is not one of this task")
        self.values[name] = value
        if defaulted:
            self.defaulted.append(name)

    def missing(self, *, group: bool) -> list[str]:
        """Rewards that are not entered yet, of those that see the group or of the others."""
        return [rule.name for rule in self._rules if rule.group is group and rule.name not in self.values]

    def total(self) -> float:
        """The reward of the trajectory; all rewards must be entered."""
        return total(self._rules, self.values)
