"""Scoring: every finished episode gets each reward of its task once, and only its own trajectory waits for them.

    episode over ─► its own rewards, at the same time ─► (group rewards: with the rest of the group) ─► their sum

`policy.rewards` has the rules of every task, `types.rewards.RewardSheet` the rewards of one trajectory. A reward that
fails for good ends its trajectories as `reward_failed`, unless it has a default; it is never 0 by itself. The journal
has every reward by name (`RewardGiven`, `RewardFailed`) and their sum (`RewardArrived`); where a task has a single
plain reward, only the latter.
"""

import asyncio
import math
from collections.abc import Sequence

from rollart.control.context import Context
from rollart.control.rewards import RewardDispatch
from rollart.policy.rewards import RewardPlans
from rollart.types.errors import InvariantBroken, RewardFault
from rollart.types.failures import FailureKind
from rollart.types.ids import GroupId, TrajectoryId
from rollart.types.journal import RewardArrived, RewardFailed, RewardGiven
from rollart.types.messages import EpisodeRecord, Scored, ScoreRequest
from rollart.types.rewards import RewardRule, RewardSheet, is_plain
from rollart.types.trajectory import Trajectory


class _Pending:
    """A trajectory waiting for its own rewards, whose request keys are kept, or for those of its group."""

    __slots__ = ("for_group", "future", "keys", "trajectory")

    def __init__(self, trajectory: Trajectory, future: "asyncio.Future[None]", *, for_group: bool) -> None:
        self.trajectory = trajectory
        self.future = future
        self.for_group = for_group
        self.keys: list[str] = []


class Scoring:
    """Trajectories that wait for rewards; see the module."""

    def __init__(self, context: Context, dispatch: RewardDispatch, plans: RewardPlans) -> None:
        self._context = context
        self._dispatch = dispatch
        self._plans = plans
        self._pending: dict[TrajectoryId, _Pending] = {}
        self._group_keys: dict[GroupId, list[str]] = {}

    def by_group(self, task: str) -> bool:
        """Whether the task has rewards that compare the members of a group."""
        return any(rule.group for rule in self._plans[task])

    def score(self, trajectory: Trajectory) -> "asyncio.Future[None]":
        """Ask for the trajectory's own rewards. The future fails with `RewardFault` if one cannot be had.

        If its task has no other rewards, it then has its reward.
        """
        rules = self._plans[trajectory.task]
        sheet = trajectory.rewards = RewardSheet(rules)
        pending = self._wait(trajectory, for_group=False)
        own = [rule for rule in rules if not rule.group]
        for rule in own:
            key = f"t{trajectory.id}" if len(rules) == 1 else f"t{trajectory.id}/{rule.name}"
            pending.keys.append(key)
            self._ask(rule, key, f"trajectory {trajectory.id}", [trajectory])
        if not own:
            self._check(pending, sheet)
        return pending.future

    def await_group(self, trajectory: Trajectory) -> "asyncio.Future[None]":
        """Future of the group rewards of a trajectory that has its own; `score_group` requests them."""
        return self._wait(trajectory, for_group=True).future

    def score_group(self, group: GroupId, attempt: int, members: Sequence[Trajectory]) -> None:
        """Ask for the group rewards of these members, which all wait for them. `attempt` counts within the group."""
        keys = self._group_keys[group] = []
        for rule in self._plans[members[0].task]:
            if rule.group:
                key = f"g{group}.{attempt}/{rule.name}"
                keys.append(key)
                self._ask(rule, key, f"group {group}", members)

    def forget(self, trajectory: Trajectory) -> None:
        """The trajectory has ended: drop its own requests; idempotent."""
        pending = self._pending.pop(trajectory.id, None)
        if pending is not None:
            self._drop(pending)

    def forget_group(self, group: GroupId) -> None:
        """Drop the requests of a group; idempotent."""
        for key in self._group_keys.pop(group, ()):
            self._dispatch.forget(key)

    def _wait(self, trajectory: Trajectory, *, for_group: bool) -> _Pending:
        future = self._context.loop.create_future()
        pending = self._pending[trajectory.id] = _Pending(trajectory, future, for_group=for_group)
        return pending

    def _drop(self, pending: _Pending) -> None:
        for key in pending.keys:
            self._dispatch.forget(key)
        pending.keys.clear()

    def _ask(self, rule: RewardRule, key: str, subject: str, members: Sequence[Trajectory]) -> None:
        if len(self._plans[members[0].task]) > 1:
            subject = f"{subject} by {rule.name}"
        episodes = tuple([_record(member, transcript=rule.transcript) for member in members])
        request = ScoreRequest(key, members[0].task, rule.name, episodes, rule.deadline_s)
        self._dispatch.ask(
            request,
            subject,
            rule.deadline_s,
            lambda answer: self._answered(rule, members, answer),
            lambda fault: self._failed(rule, members, fault),
        )

    def _answered(self, rule: RewardRule, members: Sequence[Trajectory], answer: Scored) -> None:
        self._enter(rule, members, [float(value) for value in answer.values], answer.parts, defaulted=False)

    def _failed(self, rule: RewardRule, members: Sequence[Trajectory], fault: RewardFault) -> None:
        waiting = self._waiting(members)
        if waiting and self._listed(waiting[0]):
            ids = tuple([member.id for member in waiting])
            self._context.record(RewardFailed(self._context.now(), rule.name, ids, str(fault)))
        if rule.default is not None:
            self._enter(rule, members, [rule.default] * len(members), (), defaulted=True)
            return
        for member in waiting:
            self._fail(self._pending[member.id], fault)

    def _enter(
        self,
        rule: RewardRule,
        members: Sequence[Trajectory],
        values: Sequence[float],
        parts: Sequence[dict[str, float]],
        *,
        defaulted: bool,
    ) -> None:
        """Enter a reward of these members. Those that were stopped in the meantime need none."""
        waiting = self._waiting(members)
        at = {member.id: index for index, member in enumerate(members)}
        chosen = [at[member.id] for member in waiting]
        if waiting and (parts or self._listed(waiting[0])):
            self._context.record(
                RewardGiven(
                    self._context.now(),
                    rule.name,
                    tuple([member.id for member in waiting]),
                    tuple([values[index] for index in chosen]),
                    tuple([parts[index] for index in chosen]) if parts else (),
                    defaulted,
                )
            )
        for member, index in zip(waiting, chosen, strict=True):
            sheet = _sheet(member)
            sheet.enter(rule.name, values[index], defaulted=defaulted)
            self._check(self._pending[member.id], sheet)

    def _check(self, pending: _Pending, sheet: RewardSheet) -> None:
        """Resolve the wait if no reward is missing. Once all are in, the reward is their weighted sum."""
        if sheet.missing(group=pending.for_group):
            return
        if not sheet.missing(group=not pending.for_group):
            total = sheet.total()
            if not math.isfinite(total):
                reason = f"the weighted sum of the rewards of trajectory {pending.trajectory.id} is {total}"
                self._fail(pending, RewardFault(reason, FailureKind.INVALID))
                return
            pending.trajectory.reward = total
            self._context.record(RewardArrived(self._context.now(), pending.trajectory.id, total))
        pending.future.set_result(None)

    def _fail(self, pending: _Pending, fault: RewardFault) -> None:
        self._drop(pending)
        if not pending.future.done():
            # Each trajectory has a fault of its own: an exception that is raised several times grows a traceback.
            pending.future.set_exception(RewardFault(str(fault), fault.kind))

    def _waiting(self, members: Sequence[Trajectory]) -> list[Trajectory]:
        """The members that still wait for a reward."""
        return [
            member for member in members if member.id in self._pending and not self._pending[member.id].future.done()
        ]

    def _listed(self, trajectory: Trajectory) -> bool:
        return not is_plain(self._plans[trajectory.task])


def _record(trajectory: Trajectory, *, transcript: bool) -> EpisodeRecord:
    return EpisodeRecord(
        trajectory.id,
        trajectory.prompt.seed,
        tuple(trajectory.turn_rewards),
        trajectory.truncated,
        trajectory.transcript if transcript else b"",
    )


def _sheet(trajectory: Trajectory) -> RewardSheet:
    if trajectory.rewards is None:
        raise InvariantBroken(f"trajectory {trajectory.id} has a reward and no sheet to enter it on")
    return trajectory.rewards
