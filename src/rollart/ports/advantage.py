"""The Advantage port: a function from the groups of a batch to one advantage per trajectory or turn.

    def centred(batch: Sequence[Group], *, scale: float = 1.0) -> Advantages:
        return [[scale * (m.reward - fmean(group.rewards)) for m in group.members] for group in batch]

It is called by the controller for every claimed batch, so it must be quick, and a function of its arguments alone: the
same batch gives the same advantages. Invariant: `Estimator.per_turn` returns a finite number for every turn of every
trajectory; anything else is an `AdvantageFailed` that names the function, the group and the trajectory.
"""

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rollart.types.credit import Advantage, AdvantageFunction, Group, Member
from rollart.types.errors import AdvantageFailed

NUMBERS = "it must return one number per trajectory, or one per turn"


class Estimator(NamedTuple):
    """An advantage function with its settings. `name` is for messages."""

    name: str
    function: AdvantageFunction
    settings: Mapping[str, Any]

    def per_turn(self, batch: Sequence[Group]) -> list[list[list[float]]]:
        """Groups, members, turns."""
        try:
            answer: object = self.function(batch, **self.settings)
        except Exception as error:  # the boundary of user code: its errors are attributed to it
            raise AdvantageFailed(f"the advantage {self.name} raised {type(error).__name__}: {error}") from error
        groups = self._list(answer, len(batch), "groups", "the batch")
        return [self._of_group(group, values) for group, values in zip(batch, groups, strict=True)]

    def _of_group(self, group: Group, values: object) -> list[list[float]]:
        members = self._list(values, len(group.members), "trajectories", f"group {group.id} of {group.task}")
        return [self._of_member(group, *pair) for pair in zip(group.members, members, strict=True)]

    def _of_member(self, group: Group, member: Member, value: Advantage) -> list[float]:
        where = f"trajectory {member.trajectory} (group {group.id} of {group.task})"
        if isinstance(value, numbers.Real):
            turns: Sequence[object] = [value] * member.turns
        else:
            turns = self._list(value, member.turns, "turns", where)
        for turn in turns:
            if isinstance(turn, bool) or not isinstance(turn, numbers.Real) or not math.isfinite(turn):
                raise AdvantageFailed(
                    f"the advantage {self.name} returned {turn!r} for {where}; it must be a finite number"
                )
        return [float(turn) for turn in turns if isinstance(turn, numbers.Real)]

    def _list(self, value: Any, length: int, kind: str, where: str) -> Sequence[Any]:
        """The value as a sequence; NumPy arrays are accepted."""
        listed = value.tolist() if hasattr(value, "tolist") else value
        if not isinstance(listed, Sequence) or isinstance(listed, str | bytes):
            raise AdvantageFailed(
                f"the advantage {self.name} returned a {type(value).__name__} for {where}; {NUMBERS}, in a list for "
                "each group"
            )
        if len(listed) != length:
            raise AdvantageFailed(
                f"the advantage {self.name} returned {len(listed)} values for {where}, which has {length} {kind}; "
                f"{NUMBERS}"
            )
        return listed
