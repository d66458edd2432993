"""SampleBuffer: complete groups wait here until a batch is whole.

`get_batch` is the only blocking call of the training loop. It evicts stale groups before it claims, and the claim is
durable in the journal before the batch is returned.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from rollart.control.context import Context
from rollart.control.credit import reward_of
from rollart.policy.buffer import BufferBook, ReadyGroup
from rollart.policy.groups import OpenGroup
from rollart.policy.shares import Redistributed, ShareBook, ShareRule, Unfillable
from rollart.policy.staleness import StalenessBound
from rollart.types.errors import InvariantBroken, RunError, ShareUnfilled
from rollart.types.ids import ClaimId, GroupId
from rollart.types.journal import BatchClaimed, ShareRedistributed
from rollart.types.trajectory import GroupOutcome, StaleTreatment, Trajectory
from rollart.types.versions import Version, steps_between


@dataclass(frozen=True, slots=True)
class Batch:
    """A claimed batch: the members of whole groups, to be credited and trained."""

    claim: ClaimId
    groups: Sequence[Sequence[Trajectory]]


@dataclass(frozen=True, slots=True)
class _Entry:
    group: OpenGroup
    trajectories: list[Trajectory]


class BufferObserver(Protocol):
    """What rollout hears from the buffer."""

    def group_dropped(self, group: OpenGroup, outcome: GroupOutcome, cause: str) -> None:
        """A ready group left the buffer without being trained."""

    def shares_changed(self) -> None:
        """A task has to fill in for another."""

    def batch_claimed(self) -> None:
        """A batch is claimed, but not durable yet: what starts from now on belongs to the next one."""


class SampleBuffer:
    """Ready groups and their trajectories; see the module."""

    def __init__(
        self, context: Context, bound: StalenessBound, served: Callable[[], Version], observer: BufferObserver
    ) -> None:
        self._context = context
        self._observer = observer
        self._bound = bound
        self._served = served
        self._book = BufferBook()
        self._entries: dict[GroupId, _Entry] = {}
        self._changed: asyncio.Future[None] | None = None
        self.steps_claimed = 0
        self._next_claim = context.lineage.state().next_claim
        config = context.config
        self.shares = ShareBook(
            {
                task: ShareRule(groups, config.tasks[task].share_deadline_s, config.tasks[task].unfilled)
                for task, groups in config.groups_per_batch().items()
            },
            config.algorithm.filter_limit,
        )

    def ready(self, task: str) -> int:
        return self._book.counts().get(task, 0)

    def add(self, group: OpenGroup, trajectories: Sequence[Trajectory]) -> None:
        """A complete group. It must have a member that can be trained."""
        oldest = _oldest(trajectories)
        if oldest is None:
            raise InvariantBroken(f"group {group.id} has nothing to train")
        self._entries[group.id] = _Entry(group, list(trajectories))
        self._book.add(ReadyGroup(group.id, group.task, oldest))
        self._tell()

    def evict_stale(self) -> None:
        """Evict groups past the bound, or mask their late members where the task is configured so."""
        served = self._served()
        for ready in self._book.stale(self._bound, served):
            entry = self._entries[ready.id]
            if self._context.config.tasks[ready.task].stale is StaleTreatment.MASK:
                for trajectory in entry.trajectories:
                    if self._bound.violated(served, trajectory.first_version):
                        trajectory.masked = True
                oldest = _oldest(entry.trajectories)
                if oldest is not None:
                    self._book.replace(ReadyGroup(ready.id, ready.task, oldest))
                    continue
            self._drop(ready, GroupOutcome.STALE, "past the staleness bound in the buffer")

    def drop_all(self, outcome: GroupOutcome, cause: str) -> None:
        """Drop every ready group."""
        for ready in self._book.ready():
            self._drop(ready, outcome, cause)

    def roll_back(self, step: int) -> None:
        """Drop groups with tokens of a later step; claims count from `step` again."""
        for ready in self._book.ready():
            if any(beyond(trajectory, step) for trajectory in self._entries[ready.id].trajectories):
                self._drop(ready, GroupOutcome.CANCELLED, "rollback")
        self.steps_claimed = step

    async def get_batch(self, trained: Version) -> Batch:
        """Wait for a whole batch and claim it. `trained` is the version that it is going to be trained on."""
        self.shares.wait_started(self._context.now())
        while True:
            if not self.shares.missing(self._book.counts()):
                # Groups that a new version made stale were evicted when it came into service; this catches the rest.
                self.evict_stale()
                if not self.shares.missing(self._book.counts()):
                    return await self._claim(trained)
            verdict = self.shares.check(self._book.counts(), self._context.now())
            if isinstance(verdict, Unfillable):
                raise ShareUnfilled(
                    f"step {trained.step}: {verdict.cause}. Look at the outcomes of its trajectories "
                    "(`rollart sim` and `rollart train` print them), mend the cause and resume."
                )
            if isinstance(verdict, Redistributed):
                self._context.record(
                    ShareRedistributed(
                        self._context.now(), trained.step, verdict.missing, verdict.filled_by, verdict.cause
                    )
                )
                self._observer.shares_changed()
                continue
            await self._wait()

    async def _wait(self) -> None:
        """Until a group becomes ready or a share's deadline passes."""
        now = self._context.now()
        wake = self.shares.next_wake()
        # After the last share deadline another task fills in. If that takes a whole batch more, the run stops.
        last_resort_s = 2 * max(task.share_deadline_s for task in self._context.config.tasks.values())
        short = ", ".join(f"{task} {count}" for task, count in self.shares.missing(self._book.counts()).items())
        changed = self._changed = self._context.loop.create_future()
        timer = None if wake is None else self._context.call_at(max(wake, now), self._tell)
        try:
            await self._context.waits.wait(
                changed, "rollout", f"groups for the batch: {short}", last_resort_s, "the run stops", RunError
            )
        finally:
            if timer is not None:
                timer.cancel()

    async def _claim(self, trained: Version) -> Batch:
        claim = ClaimId(self._next_claim)
        self._next_claim += 1
        served = self._served()
        taken = self._book.claim(claim, self.shares.need, self._bound, served)
        # Before the claim is durable: claimed groups no longer count as ready, and admission must see both numbers.
        self.steps_claimed += 1
        self.shares.claimed()
        self._note_ready()
        entries = [self._entries[ready.id] for ready in taken]
        trajectories = [trajectory for entry in entries for trajectory in entry.trajectories]
        self._context.record(
            BatchClaimed(
                self._context.now(),
                claim,
                trained.step,
                served,
                trained,
                tuple(ready.id for ready in taken),
                tuple(trajectory.id for trajectory in trajectories),
                tuple(steps_between(served, ready.oldest) for ready in taken),
                tuple(steps_between(trained, ready.oldest) for ready in taken),
                tuple(trajectory.id for trajectory in trajectories if trajectory.masked),
                _mean_rewards(trajectories),
            )
        )
        self._observer.batch_claimed()
        await self._context.sink.flush()
        return Batch(claim, [entry.trajectories for entry in entries])

    def trained(self, claim: ClaimId) -> list[OpenGroup]:
        """The claim ended in a step: its groups are trained."""
        return [self._entries.pop(ready.id).group for ready in self._book.trained(claim)]

    def returned(self, claim: ClaimId) -> None:
        """The claim came to nothing: its groups are ready again."""
        self._book.returned(claim)
        self.steps_claimed -= 1
        self._tell()

    def claims(self) -> list[ClaimId]:
        return self._book.claims()

    def _drop(self, ready: ReadyGroup, outcome: GroupOutcome, cause: str) -> None:
        self._book.remove(ready)
        self._note_ready()
        self._observer.group_dropped(self._entries.pop(ready.id).group, outcome, cause)

    def _tell(self) -> None:
        self._note_ready()
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    def _note_ready(self) -> None:
        accounts = self._context.accounts
        accounts.batch_ready = not self.shares.missing(self._book.counts())
        accounts.changed(self._context.now())


def beyond(trajectory: Trajectory, step: int) -> bool:
    """Whether a trajectory has tokens that were sampled with weights later than `step`."""
    return trajectory.last_version is not None and trajectory.last_version.step > step


def _oldest(trajectories: Sequence[Trajectory]) -> Version | None:
    """The first version of the oldest trajectory whose tokens will be trained."""
    versions = [t.first_version for t in trajectories if not t.masked and t.first_version is not None]
    return min(versions, default=None)


def _mean_rewards(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    rewards: dict[str, list[float]] = {}
    for trajectory in trajectories:
        rewards.setdefault(trajectory.task, []).append(reward_of(trajectory))
    return {task: math.fsum(values) / len(values) for task, values in rewards.items()}
