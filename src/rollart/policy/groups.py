"""Groups in the making: which members to start, keep, replace and stop.

A group is promised `size` members with a result, and starts `extra` more than that. It stays in the book until a batch
claims it or it ends untrained. Every started member leaves `running` exactly once, by `member_ended`.

    open ── member_started … member_ended ──┬─► ready ──────────────────► claimed: `close`
      ▲                                     │     │ more results join until then
      │                                     │     ▼
      ├──────── members lost: `lose` ◄──────┴─────┘
      └─► close: hopeless, filtered, stale, redundant, cancelled

A group becomes ready with `size` results. At its last chance to be claimed within the staleness bound it becomes ready
with `minimum` of them, because the next update would cost it those (see `control.groups`). Members past the bound are
lost one by one: the group goes on with those that are left, and starts new ones.

Where rewards compare the members of a group, a member that has finished its episode stays in `running` and waits in
`finished`; it counts as a result. Instead of becoming ready, the group is then judged (`judge`): its set of members is
fixed, it starts no others, and it becomes ready when those in `finished` have ended with their rewards.

    open ── member_finished … ──► judged: `judge` ── member_ended … ──► ready
      ▲                              │
      └── the reward failed: `unjudge` ◄┘
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from rollart.policy.staleness import StalenessBound
from rollart.types.errors import InvariantBroken
from rollart.types.ids import GroupId, TrajectoryId
from rollart.types.trajectory import FAILURES, TRAINABLE, Outcome, Purpose, Ticket
from rollart.types.versions import Version

MAX_PROMPT_ATTEMPTS = 3
"""Failed groups after which a prompt is set aside, because the prompt itself is likely at fault."""


@dataclass(slots=True)
class OpenGroup:
    """A group in the making."""

    id: GroupId
    task: str
    purpose: Purpose
    ticket: Ticket
    size: int
    extra: int
    minimum: int
    """Members with trained tokens that it must have at its claim."""
    bound: StalenessBound
    next_member: int
    running: dict[TrajectoryId, Version | None] = field(default_factory=dict)
    """Members started and not ended, with the version of their first token."""
    kept: dict[TrajectoryId, Version | None] = field(default_factory=dict)
    """Members with a result, in the order in which they ended. Masked ones have no version: they do not age it."""
    masked: set[TrajectoryId] = field(default_factory=set)
    replaced: int = 0
    """Members that were replaced because they were late."""
    failed: int = 0
    lost: int = 0
    """Updates at which it lost members to the staleness bound."""
    own_bound: bool = False
    """Whether `bound` is wider than its task's, so that its prompt does not starve."""
    overtime: bool = False
    """Older than its task's bound, under a wider one of its own; not counted by admission."""
    ready: bool = False
    finished: dict[TrajectoryId, None] = field(default_factory=dict)
    """Running members that only wait for the rewards that compare their group."""
    judged: bool = False
    """Whether those rewards were asked for, so that its members are fixed."""
    judgements: int = 0
    """How often they were."""

    @property
    def wanted(self) -> int:
        """Number of members to start now."""
        if self.ready or self.judged:
            return 0
        return max(0, self.size + self.extra - len(self.running) - len(self.kept))

    @property
    def oldest(self) -> Version | None:
        """First version of the oldest member; None while no member has a token."""
        return _oldest([*self.running.values(), *self.kept.values()])

    @property
    def oldest_kept(self) -> Version | None:
        """First version of the oldest member with a result whose tokens will be trained."""
        if self.finished:
            return _oldest([*self.kept.values(), *(self.running[id] for id in self.finished)])
        return _oldest(self.kept.values())

    @property
    def complete(self) -> bool:
        return len(self.kept) + len(self.finished) >= self.size

    @property
    def enough(self) -> bool:
        """Whether the minimum of its members can be trained. Masked ones do not count as trained."""
        return self.enough_without(())

    def enough_without(self, members: Collection[TrajectoryId]) -> bool:
        """The same after these were lost."""
        return (
            sum(id not in self.masked and id not in members for of in (self.kept, self.finished) for id in of)
            >= self.minimum
        )

    @property
    def unfinished(self) -> list[TrajectoryId]:
        """Members whose episodes still run."""
        return [id for id in self.running if id not in self.finished]

    @property
    def hopeless(self) -> bool:
        """Whether too many members failed for it to be chance: the prompt is to blame."""
        return self.failed > 2 * self.size + 2

    @property
    def losses(self) -> int:
        """Losses of its prompt to the staleness bound, those of earlier groups included."""
        return self.ticket.losses + self.lost

    def past_bound(self, served: Version) -> list[TrajectoryId]:
        """Members past the staleness bound, those with a result first."""
        members = [*self.kept.items(), *self.running.items()]
        return [id for id, first in members if self.bound.violated(served, first)]

    def requeued(self, *, failed: bool, stale: bool) -> Ticket:
        """The prompt's ticket for another group."""
        return self.ticket.again(self.next_member, failed=failed, lost=self.lost + stale)


def _oldest(versions: Iterable[Version | None]) -> Version | None:
    return min(filter(None, versions), default=None)


class GroupBook:
    """All groups in the making, in the order in which they were opened."""

    def __init__(self) -> None:
        self._groups: dict[GroupId, OpenGroup] = {}
        self._short: dict[str, dict[GroupId, None]] = {}
        self._training: dict[str, int] = {}

    def __contains__(self, group: GroupId) -> bool:
        return group in self._groups

    def __getitem__(self, group: GroupId) -> OpenGroup:
        return self._groups[group]

    def get(self, group: GroupId) -> OpenGroup | None:
        return self._groups.get(group)

    def groups(self) -> list[OpenGroup]:
        return list(self._groups.values())

    def training(self, task: str) -> int:
        """Training groups of a task that admission counts: open or ready, without those in overtime."""
        return self._training.get(task, 0)

    def open(
        self,
        id: GroupId,
        ticket: Ticket,
        purpose: Purpose,
        *,
        size: int,
        bound: StalenessBound,
        extra: int = 0,
        minimum: int | None = None,
        own_bound: bool = False,
    ) -> OpenGroup:
        """Open a group. `minimum` defaults to `size`."""
        if id in self._groups:
            raise InvariantBroken(f"group {id} was opened twice")
        group = OpenGroup(
            id,
            ticket.prompt.task,
            purpose,
            ticket,
            size,
            extra,
            size if minimum is None else minimum,
            bound,
            ticket.next_member,
            own_bound=own_bound,
        )
        self._add(group)
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
        """Record the end of a member; it is kept if it has a result."""
        entry = self._groups[group]
        if trajectory not in entry.running:
            raise InvariantBroken(f"trajectory {trajectory} of group {group} ended twice, or was never started")
        first = entry.running.pop(trajectory)
        entry.finished.pop(trajectory, None)
        if outcome in TRAINABLE:
            entry.kept[trajectory] = first
        elif outcome in FAILURES:
            entry.failed += 1
        self._note(entry)
        return entry

    def member_finished(self, group: GroupId, trajectory: TrajectoryId) -> None:
        """The episode of a running member is over; it waits for the rewards that compare its group."""
        entry = self._groups[group]
        if trajectory not in entry.running or entry.judged:
            raise InvariantBroken(f"trajectory {trajectory} finished, but group {group} does not wait for it")
        entry.finished[trajectory] = None
        self._note(entry)

    def judge(self, group: GroupId) -> None:
        """Fix the members of the group: the finished ones are compared, and those still running no longer age it."""
        entry = self._groups[group]
        entry.judged = True
        entry.judgements += 1
        for id in entry.unfinished:
            self.masked(group, id)
        self._note(entry)

    def unjudge(self, group: GroupId) -> None:
        """The group's rewards failed, and its members with them; the group starts new members."""
        entry = self._groups[group]
        entry.judged = False
        self._note(entry)

    def lose(self, group: GroupId, members: Iterable[TrajectoryId]) -> None:
        """Give up members that are past the staleness bound. Running ones do not age the group until they end."""
        entry = self._groups[group]
        entry.lost += 1
        for id in members:
            if id in entry.running:
                self.masked(group, id)
                entry.finished.pop(id, None)
            else:
                del entry.kept[id]
        self._note(entry)

    def set_ready(self, group: GroupId, ready: bool) -> None:
        """A ready group starts no members; those that run may still join it."""
        entry = self._groups[group]
        entry.ready = ready
        self._note(entry)

    def grant(self, group: GroupId, bound: StalenessBound) -> None:
        """Give a group a staleness bound of its own."""
        entry = self._groups[group]
        entry.bound, entry.own_bound = bound, True

    def set_overtime(self, group: GroupId) -> None:
        """Stop counting a group that is older than its task's bound, so that another may open. Idempotent."""
        entry = self._groups[group]
        self._count(entry, -1)
        entry.overtime = True

    def close(self, group: GroupId) -> OpenGroup:
        """Remove the group from the book. The caller stops running members; no new ones are started."""
        entry = self._groups.pop(group)
        self._short.get(entry.task, {}).pop(group, None)
        self._count(entry, -1)
        return entry

    def put_back(self, group: OpenGroup) -> None:
        """A claimed group whose claim was returned is ready again, with the results that it had."""
        group.running.clear()
        self._add(group)

    def _add(self, group: OpenGroup) -> None:
        self._groups[group.id] = group
        self._count(group, +1)
        self._note(group)

    def _note(self, group: OpenGroup) -> None:
        short = self._short.setdefault(group.task, {})
        if group.wanted and not group.complete:
            short[group.id] = None
        else:
            short.pop(group.id, None)

    def _count(self, group: OpenGroup, change: int) -> None:
        if group.purpose is Purpose.TRAIN and not group.overtime:
            self._training[group.task] = self._training.get(group.task, 0) + change
