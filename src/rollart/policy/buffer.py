"""Ready groups and claims.

A group enters when it is ready, and leaves in exactly one way: trained (its claim ended in a step) or removed (stale,
redundant, cancelled, or short of members again). A claim takes the groups with the oldest weights first, because those
go stale next. It ends in `trained` or `returned`; the latter puts its groups back in their old order.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from rollart.types.errors import InvariantBroken
from rollart.types.ids import ClaimId, GroupId
from rollart.types.versions import Version


@dataclass(frozen=True, slots=True)
class ReadyGroup:
    """A ready group. `oldest` is the first version of its oldest member that will be trained."""

    id: GroupId
    task: str
    oldest: Version


class BufferBook:
    """Ready groups by task, in the order in which they became ready, and the open claims."""

    def __init__(self) -> None:
        self._ready: dict[str, dict[GroupId, ReadyGroup]] = {}
        self._claims: dict[ClaimId, list[ReadyGroup]] = {}
        self._places: dict[GroupId, int] = {}
        """Arrival number of every ready or claimed group."""
        self._added = 0

    def counts(self) -> dict[str, int]:
        return {task: len(groups) for task, groups in self._ready.items()}

    def ready(self) -> list[ReadyGroup]:
        return [group for groups in self._ready.values() for group in groups.values()]

    def claims(self) -> list[ClaimId]:
        """Open claims: neither trained nor returned."""
        return list(self._claims)

    def add(self, group: ReadyGroup) -> None:
        self._places[group.id] = self._added
        self._added += 1
        self._ready.setdefault(group.task, {})[group.id] = group

    def remove(self, group: GroupId) -> None:
        """Remove a ready group that will not be claimed as it is."""
        for groups in self._ready.values():
            if group in groups:
                del groups[group]
                del self._places[group]
                return
        raise InvariantBroken(f"group {group} is not ready")

    def replace(self, group: ReadyGroup) -> None:
        """Update a ready group in place (a member joined or was masked)."""
        self._ready[group.task][group.id] = group

    def claim(self, id: ClaimId, need: Mapping[str, int]) -> list[ReadyGroup]:
        """Claim a batch: for every task the groups with the oldest weights, ties in order of arrival."""
        taken: list[ReadyGroup] = []
        for task, count in need.items():
            groups = sorted(self._ready.get(task, {}).values(), key=lambda group: group.oldest.step)[:count]
            if len(groups) < count:
                raise InvariantBroken(f"claim {id} wants {count} groups of {task}, {len(groups)} are ready")
            taken.extend(groups)
        for group in taken:
            del self._ready[group.task][group.id]
        self._claims[id] = taken
        return taken

    def trained(self, id: ClaimId) -> list[ReadyGroup]:
        """End a claim whose step was made; its groups leave the buffer for good."""
        groups = self._claims.pop(id)
        for group in groups:
            del self._places[group.id]
        return groups

    def returned(self, id: ClaimId) -> list[ReadyGroup]:
        """End a claim without a step; its groups are ready again, ahead of later arrivals."""
        groups = self._claims.pop(id)
        for task in {group.task: None for group in groups}:
            ready = [*self._ready[task].values(), *(group for group in groups if group.task == task)]
            ready.sort(key=lambda group: self._places[group.id])
            self._ready[task] = {group.id: group for group in ready}
        return groups
