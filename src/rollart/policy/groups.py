"""Open groups: which members to start, keep, replace and stop.

A group needs `size` members that end with a result. It starts `extra` more than that, replaces members that fail, and
once `size` members have a result the rest are redundant. Every started member leaves exactly once, by `member_ended`;
every opened group leaves the book exactly once, by `close`.

    open ─ start … member_ended ─┬─ `complete`: enough results; its kept members go to the buffer ─┬─► close
                                 ├─ `hopeless`: too many failed                                   ─┤
                                 └─ stale, redundant, cancelled                                   ─┘
"""

from dataclasses import dataclass, field

from rollart.types.errors import InvariantBroken
from rollart.types.ids import GroupId, TrajectoryId
from rollart.types.trajectory import FAILURES, TRAINABLE, Outcome, Purpose, Ticket
from rollart.types.versions import Version

MAX_PROMPT_ATTEMPTS = 3
"""Failed groups after which a prompt is set aside, because the prompt itself is likely at fault."""


@dataclass(slots=True)
class OpenGroup:
    """A group in progress."""

    id: GroupId
    task: str
    purpose: Purpose
    ticket: Ticket
    size: int
    extra: int
    next_member: int
    running: dict[TrajectoryId, Version | None] = field(default_factory=dict)
    """Members started and not ended, with the version of their first token."""
    kept: dict[TrajectoryId, Version | None] = field(default_factory=dict)
    """Members with a result, in the order in which they ended. Masked ones have no version: they do not age it."""
    masked: set[TrajectoryId] = field(default_factory=set)
    failed: int = 0

    @property
    def wanted(self) -> int:
        """Number of members to start now."""
        return max(0, self.size + self.extra - len(self.running) - len(self.kept))

    @property
    def oldest(self) -> Version | None:
        """First version of the oldest member; None while no member has a token."""
        versions = [*filter(None, self.running.values()), *filter(None, self.kept.values())]
        return min(versions, default=None)

    @property
    def complete(self) -> bool:
        return len(self.kept) >= self.size

    @property
    def hopeless(self) -> bool:
        """Whether so many members failed that the prompt, not chance, must be to blame."""
        return self.failed > 2 * self.size + 2

    def requeued(self, *, failed: bool) -> Ticket:
        """The prompt's ticket for another group."""
        return self.ticket.again(self.next_member, failed=failed)


class GroupBook:
    """All open groups, in the order in which they were opened."""

    def __init__(self) -> None:
        self._groups: dict[GroupId, OpenGroup] = {}
        self._short: dict[str, dict[GroupId, None]] = {}
        self._open_by_task: dict[str, int] = {}

    def __contains__(self, group: GroupId) -> bool:
        return group in self._groups

    def __getitem__(self, group: GroupId) -> OpenGroup:
        return self._groups[group]

    def groups(self) -> list[OpenGroup]:
        return list(self._groups.values())

    def training(self, task: str) -> int:
        """Open training groups of a task."""
        return self._open_by_task.get(task, 0)

    def open(self, id: GroupId, ticket: Ticket, purpose: Purpose, *, size: int, extra: int) -> OpenGroup:
        if id in self._groups:
            raise InvariantBroken(f"group {id} was opened twice")
        group = OpenGroup(id, ticket.prompt.task, purpose, ticket, size, extra, ticket.next_member)
        self._groups[id] = group
        self._count(group, +1)
        self._note(group)
        return group

    def short_of_members(self, task: str) -> OpenGroup | None:
        """The oldest group of a task that needs another member; ids grow in the order of opening."""
        short = self._short.get(task)
        return self._groups[min(short)] if short else None

    def member_started(self, group: GroupId, trajectory: TrajectoryId) -> int:
        """Record the start of a member; returns its number within the group."""
        entry = self._groups[group]
        entry.running[trajectory] = None
        number = entry.next_member
        entry.next_member += 1
        self._note(entry)
        return number

    def first_token(self, group: GroupId, trajectory: TrajectoryId, version: Version) -> None:
        """Record the first token of a running member, which ages from here on unless masked. Idempotent."""
        entry = self._groups[group]
        if trajectory not in entry.running:
            raise InvariantBroken(f"trajectory {trajectory} of group {group} has a token, but does not run")
        if trajectory not in entry.masked:
            entry.running[trajectory] = version

    def masked(self, group: GroupId, trajectory: TrajectoryId) -> None:
        """Exclude a member's tokens from training; it no longer ages the group."""
        entry = self._groups[group]
        entry.masked.add(trajectory)
        for members in (entry.running, entry.kept):
            if trajectory in members:
                members[trajectory] = None

    def member_ended(self, group: GroupId, trajectory: TrajectoryId, outcome: Outcome) -> OpenGroup:
        """Record the end of a member; it is kept if it has a result and the group still needs one."""
        entry = self._groups[group]
        if trajectory not in entry.running:
            raise InvariantBroken(f"trajectory {trajectory} of group {group} ended twice, or was never started")
        first = entry.running.pop(trajectory)
        if outcome in TRAINABLE and not entry.complete:
            entry.kept[trajectory] = first
        elif outcome in FAILURES:
            entry.failed += 1
        self._note(entry)
        return entry

    def close(self, group: GroupId) -> OpenGroup:
        """Remove the group from the book. The caller cancels running members; no new ones are started."""
        entry = self._groups.pop(group)
        self._short.get(entry.task, {}).pop(group, None)
        self._count(entry, -1)
        return entry

    def _note(self, group: OpenGroup) -> None:
        short = self._short.setdefault(group.task, {})
        if group.wanted and not group.complete:
            short[group.id] = None
        else:
            short.pop(group.id, None)

    def _count(self, group: OpenGroup, change: int) -> None:
        if group.purpose is Purpose.TRAIN:
            self._open_by_task[group.task] = self._open_by_task.get(group.task, 0) + change
