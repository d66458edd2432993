"""SampleBuffer: ready groups wait here until a batch is whole.

`get_batch` is the only blocking call of the training loop. Rollout owns the groups until they are claimed; the claim is
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
from rollart.policy.liveness import rewards_bound_s
from rollart.policy.shares import Redistributed, ShareBook, ShareRule, Unfillable
from rollart.types.errors import RunError, ShareUnfilled
from rollart.types.ids import ClaimId, GroupId
from rollart.types.journal import BatchClaimed, ShareRedistributed
from rollart.types.trajectory import Trajectory
from rollart.types.versions import Version, steps_between


@dataclass(frozen=True, slots=True)
class Batch:
    """A claimed batch: the members of its groups, to be credited and trained."""

    claim: ClaimId
    groups: Sequence[Sequence[Trajectory]]


@dataclass(frozen=True, slots=True)
class ClaimedGroup:
    """A group of a batch, and its members with a result."""

    group: OpenGroup
    trajectories: list[Trajectory]


class GroupOwner(Protocol):
    """Rollout, as the buffer sees it."""

    def before_claim(self) -> None:
        """Called before a claim: drop stale members; groups that the next update would cost members become ready."""

    def last_judged(self) -> "asyncio.Future[None] | None":
        """Future that resolves once groups at their last chance have their rewards; None if none are pending."""

    def take(self, group: GroupId) -> ClaimedGroup:
        """Remove a ready group for a claim; returns it with its current results."""

    def batch_claimed(self, claimed: Sequence[ClaimedGroup]) -> None:
        """Called when the claim is journalled, before it is durable. What starts from here on is for the next batch."""

    def put_back(self, claimed: ClaimedGroup) -> None:
        """The claim of this group was returned."""

    def shares_changed(self) -> None:
        """Called when a share was redistributed to other tasks."""


class SampleBuffer:
    """Ready groups and claims; see the module."""

    def __init__(self, context: Context, served: Callable[[], Version], owner: GroupOwner) -> None:
        self._context = context
        self._owner = owner
        self._served = served
        self._book = BufferBook()
        self._claims: dict[ClaimId, list[ClaimedGroup]] = {}
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

    def add(self, group: ReadyGroup) -> None:
        """A group is ready."""
        self._book.add(group)
        self._wake()

    def replace(self, group: ReadyGroup) -> None:
        """Members of a ready group have changed."""
        self._book.replace(group)

    def remove(self, group: GroupId) -> None:
        """A group is no longer ready."""
        self._book.remove(group)
        self._note_ready()

    async def get_batch(self, trained: Version) -> Batch:
        """Wait for a whole batch and claim it. `trained` is the version that it is going to be trained on."""
        self.shares.wait_started(self._context.now())
        while True:
            if not self.shares.missing(self._book.counts()):
                self._owner.before_claim()
                await self._last_rewards()
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
                self._owner.shares_changed()
                continue
            await self._wait()

    async def _last_rewards(self) -> None:
        """Wait for rewards of groups at their last chance: this claim is the last that they can be part of."""
        judged = self._owner.last_judged()
        if judged is None:
            return
        config = self._context.config
        limit_s = max(rewards_bound_s(config, task) for task in config.tasks)
        await self._context.waits.wait(
            judged, "the claim", "rewards of groups at their last chance", limit_s, "the run stops", RunError
        )
        self._owner.before_claim()

    async def _wait(self) -> None:
        """Until a group becomes ready or a share's deadline passes."""
        now = self._context.now()
        wake = self.shares.next_wake()
        # After the last share deadline another task fills in. If that takes a whole batch more, the run stops.
        last_resort_s = 2 * max(task.share_deadline_s for task in self._context.config.tasks.values())
        short = ", ".join(f"{task} {count}" for task, count in self.shares.missing(self._book.counts()).items())
        changed = self._changed = self._context.loop.create_future()
        timer = None if wake is None else self._context.call_at(max(wake, now), self._wake)
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
        ready = self._book.claim(claim, self.shares.need)
        claimed = self._claims[claim] = [self._owner.take(group.id) for group in ready]
        # Before the claim is durable: claimed groups no longer count as ready, and admission must see both numbers.
        self.steps_claimed += 1
        self.shares.claimed()
        self._note_ready()
        trajectories = [trajectory for entry in claimed for trajectory in entry.trajectories]
        self._context.record(
            BatchClaimed(
                self._context.now(),
                claim,
                trained.step,
                served,
                trained,
                tuple(group.id for group in ready),
                tuple(trajectory.id for trajectory in trajectories),
                tuple(steps_between(served, group.oldest) for group in ready),
                tuple(steps_between(trained, group.oldest) for group in ready),
                tuple(trajectory.id for trajectory in trajectories if trajectory.masked),
                _mean_rewards(trajectories),
            )
        )
        self._owner.batch_claimed(claimed)
        await self._context.sink.flush()
        return Batch(claim, [entry.trajectories for entry in claimed])

    def trained(self, claim: ClaimId) -> list[OpenGroup]:
        """The claim ended in a step: its groups are trained."""
        self._book.trained(claim)
        return [entry.group for entry in self._claims.pop(claim)]

    def returned(self, claim: ClaimId) -> None:
        """End a claim without a step; its groups are ready again."""
        self._book.returned(claim)
        for entry in self._claims.pop(claim):
            self._owner.put_back(entry)
        self.steps_claimed -= 1
        self._wake()

    def claims(self) -> list[ClaimId]:
        return self._book.claims()

    def _wake(self) -> None:
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


def _mean_rewards(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    rewards: dict[str, list[float]] = {}
    for trajectory in trajectories:
        rewards.setdefault(trajectory.task, []).append(reward_of(trajectory))
    return {task: math.fsum(values) / len(values) for task, values in rewards.items()}
