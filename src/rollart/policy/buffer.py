"""Ready groups and claims.

A group enters once it is complete and accepted and leaves by exactly one door: trained (its claim ended in a step),
evicted as stale, or dropped (redundant, cancelled). A claim takes whole groups, those of the oldest weights first: they
are the next to go stale. It ends in `trained` or is `returned`, which puts its groups back where they were.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from rollart.policy.staleness import StalenessBound
from rollart.types.errors import InvariantBroken
from rollart.types.ids import ClaimId, GroupId
from rollart.types.versions import Version


@dataclass(frozen=True, slots=True)
class ReadyGroup:
    """A complete group. `oldest` is the first version of its oldest member that will be trained."""

    id: GroupId
    task: str
    oldest: Version


class BufferBook:
    """Groups by task in the order in which they became ready, and the claims that are out."""

    def __init__(self) -> None:
        self._ready: dict[str, dict[GroupId, ReadyGroup]] = {}
        self._claims: dict[ClaimId, list[ReadyGroup]] = {}
        self._places: dict[GroupId, int] = {}
        """Where every group that is ready or claimed stands in the order."""
        self._added = 0

    def counts(self) -> dict[str, int]:
        return {task: len(groups) for task, groups in self._ready.items()}

    def ready(self) -> list[ReadyGroup]:
        return [group for groups in self._ready.values() for group in groups.values()]

    def claims(self) -> list[ClaimId]:
        """Claims that neither ended in a step nor were returned."""
        return list(self._claims)

    def add(self, group: ReadyGroup) -> None:
        self._places[group.id] = self._added
        self._added += 1
        self._ready.setdefault(group.task, {})[group.id] = group

    def stale(self, bound: StalenessBound, served: Version) -> list[ReadyGroup]:
        """Groups that may no longer be claimed at `served`."""
        return [group for group in self.ready() if bound.violated(served, group.oldest)]

    def remove(self, group: ReadyGroup) -> None:
        """The group leaves without being trained."""
        del self._ready[group.task][group.id]
        del self._places[group.id]

    def replace(self, group: ReadyGroup) -> None:
        """The group changed in place (a member was masked)."""
        self._ready[group.task][group.id] = group

    def claim(self, id: ClaimId, need: Mapping[str, int], bound: StalenessBound, served: Version) -> list[ReadyGroup]:
        """Take the batch: of every task the groups of the oldest weights, of equals those that were ready first."""
        taken: list[ReadyGroup] = []
        for task, count in need.items():
            groups = sorted(self._ready.get(task, {}).values(), key=lambda group: group.oldest.step)[:count]
            if len(groups) < count:
                raise InvariantBroken(f"claim {id} wants {count} groups of {task}, {len(groups)} are ready")
            taken.extend(groups)
        for group in taken:
            if bound.violated(served, group.oldest):
                raise InvariantBroken(f"claim {id} would hold group {group.id} of {group.oldest} at {served}")
        for group in taken:
            del self._ready[group.task][group.id]
        self._claims[id] = taken
        return taken

    def trained(self, id: ClaimId) -> list[ReadyGroup]:
        """The claim ended in a step; its groups are gone for good."""
        groups = self._claims.pop(id)
        for group in groups:
            del self._places[group.id]
        return groups

    def returned(self, id: ClaimId) -> list[ReadyGroup]:
        """The claim came to nothing; its groups are ready again, before those that came later."""
        groups = self._claims.pop(id)
        for task in {group.task: None for group in groups}:
            ready = [*self._ready[task].values(), *(group for group in groups if group.task == task)]
            ready.sort(key=lambda group: self._places[group.id])
            self._ready[task] = {group.id: group for group in ready}
        return groups
