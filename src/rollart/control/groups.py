"""Groups in the making: when they are ready, what they lose, and how they end.

`policy.groups` has their life cycle. This module decides in it: a group is ready with all its results, or, at its last
chance within the staleness bound, with those that are worth waiting for; members past the bound are given up, and a
prompt that was lost too often gets a bound of its own. Every group ends exactly once, by `_record_end`.

Where rewards compare the members of a group, these are asked for at the moment at which the group would otherwise
become ready (`_judge`), once, for the members that have finished by then. That fixes the group: others are stopped, and
none is started. Members that are lost to the bound later are not trained; the rest keeps its rewards.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from rollart.config.schema import RunConfig
from rollart.control.buffer import ClaimedGroup, SampleBuffer
from rollart.control.context import Context
from rollart.control.credit import has_no_signal
from rollart.control.evaluation import Evaluation
from rollart.control.scoring import Scoring
from rollart.policy.buffer import ReadyGroup
from rollart.policy.groups import MAX_PROMPT_ATTEMPTS, GroupBook, OpenGroup
from rollart.policy.redundancy import RedundancyBook
from rollart.policy.staleness import StalenessBound
from rollart.policy.stragglers import ClaimPace, StragglerBook, replace_at
from rollart.policy.tickets import TicketQueue
from rollart.types.errors import InvariantBroken
from rollart.types.ids import GroupId, TrajectoryId
from rollart.types.journal import (
    GroupEnded,
    GroupOpened,
    GroupRules,
    MemberReplaced,
    MembersLost,
    RedundancyChanged,
)
from rollart.types.trajectory import (
    FAILURES,
    TRAINABLE,
    GroupOutcome,
    Outcome,
    Purpose,
    StaleTreatment,
    Ticket,
    Trajectory,
)
from rollart.types.versions import Version

PAST_BOUND = "past the staleness bound"


class Episodes(Protocol):
    """The episodes of the members, as groups see them."""

    def stop_episode(self, trajectory: TrajectoryId, outcome: Outcome, cause: str) -> None:
        """End a running member with this outcome."""

    def trajectory(self, id: TrajectoryId) -> Trajectory:
        """The record of a running member."""

    def schedule(self) -> None:
        """More may start."""


class Groups:
    """All groups in the making; owns them for the buffer (`GroupOwner`)."""

    def __init__(
        self,
        context: Context,
        served: Callable[[], Version],
        episodes: Episodes,
        evaluation: Evaluation,
        scoring: Scoring,
    ) -> None:
        self._context = context
        self._served = served
        self._episodes = episodes
        self._evaluation = evaluation
        self._scoring = scoring
        config = context.config
        check = context.mode.check_every_turn
        self._bounds = {task: StalenessBound(config.alpha_of(task), check) for task in config.tasks}
        self._late_bounds = {task: StalenessBound(config.late_alpha_of(task), check) for task in config.tasks}
        self._book = GroupBook()
        self._kept: dict[TrajectoryId, Trajectory] = {}
        self.buffer = SampleBuffer(context, served, owner=self)
        self.tickets = TicketQueue(config.tasks)
        self._next_group = context.lineage.state().next_group
        self._stragglers = StragglerBook(config.tasks)
        self._group_of: dict[TrajectoryId, GroupId] = {}
        """Groups of the running training members."""
        self._was_late: dict[TrajectoryId, bool] = {}
        """Running members that only wait for their group, and whether their episodes were late."""
        self._pace = ClaimPace()
        self._redundancy = (
            RedundancyBook(config.tasks, config.batch.group_size, config.max_extra) if config.automatic_extra else None
        )
        self._enforced = check and context.mode.interrupt
        """Whether an update can make members stale. If not, lateness is measured for redundancy only."""
        self._timer: asyncio.TimerHandle | None = None
        self._last_judged: asyncio.Future[None] | None = None
        """Awaited by a claim; done when no group at its last chance is being judged."""

    # Opening groups and starting members.

    def in_the_making(self, task: str) -> int:
        """Training groups that count for admission."""
        return self._book.training(task)

    def short_of_members(self, task: str) -> OpenGroup | None:
        return self._book.short_of_members(task)

    def open(self, ticket: Ticket, purpose: Purpose) -> OpenGroup:
        id = GroupId(self._next_group)
        self._next_group += 1
        prompt, batch = ticket.prompt, self._context.config.batch
        training = purpose is Purpose.TRAIN
        own_bound = training and self._starves(prompt.task, ticket.losses)
        bound = (self._late_bounds if own_bound else self._bounds)[prompt.task]
        alpha = bound.alpha if own_bound else None
        self._context.record(
            GroupOpened(self._context.now(), id, prompt.task, prompt.id, purpose, ticket.number, ticket.attempt, alpha)
        )
        if not training:
            return self._book.open(id, ticket, purpose, size=1, bound=bound)
        return self._book.open(
            id,
            ticket,
            purpose,
            size=batch.group_size,
            extra=self._extra(prompt.task),
            minimum=batch.minimum,
            bound=bound,
            own_bound=own_bound,
        )

    def _extra(self, task: str) -> int:
        return self._context.config.max_extra if self._redundancy is None else self._redundancy.extra(task)

    def _starves(self, task: str, losses: int) -> bool:
        """Whether a prompt was lost so often that it gets a bound of its own."""
        return self._context.mode.check_every_turn and losses >= self._context.config.tasks[task].stale_retries

    def member_started(self, group: OpenGroup, trajectory: TrajectoryId) -> int:
        """Record the start of a member; returns its number within the group."""
        if group.purpose is Purpose.TRAIN:
            self._stragglers.started(group.task, trajectory, self._context.now())
            self._group_of[trajectory] = group.id
            self._set_timer()
        return self._book.member_started(group.id, trajectory)

    def first_token(self, trajectory: Trajectory, version: Version) -> None:
        if trajectory.group in self._book:
            self._book.first_token(trajectory.group, trajectory.id, version)

    # The staleness bound.

    def past_bound(self, trajectory: Trajectory) -> bool:
        """Whether a running member has to end. Where the task is configured so, it continues with its tokens masked."""
        if trajectory.purpose is Purpose.EVAL or trajectory.masked or trajectory.group not in self._book:
            return False
        group = self._book[trajectory.group]
        if group.bound.violated(self._served(), trajectory.first_version):
            self._handle_past_bound(group)
            return not trajectory.masked
        return False

    def version_changed(self) -> None:
        """Drop or mask members that the new version made stale; other groups may now be at their last chance."""
        self._give_up_past_bound()
        for group in self._book.groups():
            self._withdraw_early(group)
            self._settle(group)
        self._reset_timer()

    def before_claim(self) -> None:
        """Mark groups at their last chance as ready with the members they have: the next update would cost some."""
        self._give_up_past_bound()
        for group in self._book.groups():
            self._withdraw_early(group)
            if not group.ready and not group.judged and self._last_chance(group) and group.enough:
                self._make_ready(group)

    def last_judged(self) -> "asyncio.Future[None] | None":
        """Future that resolves once no group at its last chance is being judged; None if none is."""
        if not any(self._holds_claim(group) for group in self._book.groups()):
            return None
        self._last_judged = self._context.loop.create_future()
        return self._last_judged

    def _holds_claim(self, group: OpenGroup) -> bool:
        return group.judged and not group.ready and self._last_chance(group)

    def _note_judged(self) -> None:
        """Resolve the wait of a claim once no group at its last chance is being judged."""
        waits = self._last_judged
        if waits is not None and not waits.done() and not any(map(self._holds_claim, self._book.groups())):
            waits.set_result(None)

    def _give_up_past_bound(self) -> None:
        served = self._served()
        for group in self._book.groups():
            if group.purpose is Purpose.TRAIN and group.bound.violated(served, group.oldest):
                self._handle_past_bound(group)
            elif group.own_bound and self._bounds[group.task].violated(served, group.oldest):
                self._book.set_overtime(group.id)

    def _handle_past_bound(self, group: OpenGroup) -> None:
        members = group.past_bound(self._served())
        if not members:
            return
        if self._context.config.tasks[group.task].stale is StaleTreatment.MASK:
            self._mask(group, members)
        else:
            self._lose(group, members)

    def _mask(self, group: OpenGroup, members: Sequence[TrajectoryId]) -> None:
        for id in members:
            self._member(id).masked = True
            self._book.masked(group.id, id)
        if group.ready:
            if group.enough and group.oldest_kept is not None:
                self._update_ready(group)
            else:
                self._end_stale(group)

    def _lose(self, group: OpenGroup, members: Sequence[TrajectoryId]) -> None:
        """Give up members past the bound; the group goes on with the others, or ends if there are none."""
        if group.ready and not any(id in group.kept for id in members):
            for id in members:
                self._book.masked(group.id, id)
                self._episodes.stop_episode(id, Outcome.REDUNDANT, "its group is ready without it")
            return
        left = len(group.kept) + len(group.running) - len(members)
        if group.own_bound or not left or (group.judged and not group.enough_without(members)):
            self._end_stale(group)
            return
        starves = self._starves(group.task, group.losses + 1)
        bound = self._late_bounds[group.task]
        self._context.record(
            MembersLost(self._context.now(), group.id, tuple(members), bound.alpha if starves else None)
        )
        for id in members:
            self._kept.pop(id, None)
        running = [id for id in members if id in group.running]
        self._book.lose(group.id, members)
        if starves:
            self._book.grant(group.id, bound)
        for id in running:
            self._episodes.stop_episode(id, Outcome.STALE, PAST_BOUND)
        if group.ready:
            self._check_ready(group)
        self._episodes.schedule()

    def _check_ready(self, group: OpenGroup) -> None:
        """Re-evaluate a ready group that lost members: extra ones may complete it, otherwise it starts new ones."""
        whole = group.enough if group.judged else group.complete
        if whole and group.oldest_kept is not None:
            self._update_ready(group)
        else:
            self._unready(group)
            if group.complete:
                self._complete(group)  # with nothing to train

    def _end_stale(self, group: OpenGroup) -> None:
        """End a stale group, as failed if it already had a wider bound of its own."""
        outcome = GroupOutcome.FAILED if group.own_bound else GroupOutcome.STALE
        own = f" of its own, {group.bound.alpha}" if group.own_bound else ""
        self.end(group, outcome, Outcome.STALE, PAST_BOUND + own)

    def _member(self, id: TrajectoryId) -> Trajectory:
        return self._kept[id] if id in self._kept else self._episodes.trajectory(id)

    # Stragglers.

    def _last_chance(self, group: OpenGroup) -> bool:
        """Whether the next update would cost the group results."""
        return (
            self._enforced
            and group.purpose is Purpose.TRAIN
            and group.bound.claims_left(self._served(), group.oldest_kept) == 1
        )

    def _settle(self, group: OpenGroup) -> None:
        """At its last chance a group is ready once all members that it lacks are late."""
        if not group.ready and not group.judged and self._last_chance(group) and group.enough:
            late = self._stragglers.late(group.task)
            if all(id in late for id in group.unfinished):
                self._make_ready(group)

    def _withdraw_early(self, group: OpenGroup) -> None:
        """A roll-back makes groups younger: one that became ready early waits for its other members again."""
        if group.ready and not group.judged and not group.complete and not self._last_chance(group):
            self._unready(group)

    def _set_timer(self) -> None:
        """Wake up when the next member becomes late, or a late one is due to be replaced."""
        if self._timer is not None or not (self._enforced or self._redundancy is not None):
            return
        times = [self._stragglers.next_wake()]
        times += [self._replaced_at(id, began) for task in self._bounds for id, began in self._late(task)]
        wake = min((at for at in times if at is not None), default=None)
        if wake is not None:
            self._timer = self._context.call_at(max(wake, self._context.now()), self._check_stragglers)

    def _reset_timer(self) -> None:
        """A new version or a claim changes when members are due to be replaced."""
        self._stop_timer()
        self._set_timer()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self, task: str) -> list[tuple[TrajectoryId, float]]:
        return list(self._stragglers.late(task).items())

    def _check_stragglers(self) -> None:
        self._timer = None
        now = self._context.now()
        self._stragglers.check(now)
        for task in self._bounds:
            for id, began in self._late(task):
                group = self._group_of_member(id)
                if group is None:
                    continue
                self._settle(group)
                at = self._replaced_at(id, began)
                if at is not None and at <= now:
                    self._replace(group, id)
        self._set_timer()

    def _replaced_at(self, id: TrajectoryId, began: float) -> float | None:
        """Time at which a late member is replaced; None for never.

        Always None where stale members are masked, since those are meant to finish.
        """
        if not self._context.config.batch.replace_late:
            return None
        group = self._group_of_member(id)
        if group is None or group.ready or group.judged or id in group.masked:
            return None
        if group.enough and self._last_chance(group):
            return None
        if self._context.config.tasks[group.task].stale is StaleTreatment.MASK:
            return None
        claims_left = group.bound.claims_left(self._served(), group.oldest)
        last_claim_at = None if claims_left is None else self._pace.last_claim_at(claims_left)
        patience_s = self._stragglers.patience_s(group.task)
        if last_claim_at is None or patience_s is None:
            return None
        return replace_at(began, last_claim_at, patience_s, group.replaced // group.size)

    def _group_of_member(self, id: TrajectoryId) -> OpenGroup | None:
        """The group of a running training member; None once it is claimed or has ended."""
        return self._book.get(self._group_of[id])

    def _replace(self, group: OpenGroup, id: TrajectoryId) -> None:
        self._context.record(MemberReplaced(self._context.now(), group.id, id))
        group.replaced += 1
        self._book.masked(group.id, id)
        self._episodes.stop_episode(id, Outcome.STALE, "replaced: it would miss the staleness bound")

    # Ends of members.

    def member_ended(self, trajectory: Trajectory, outcome: Outcome, cause: str) -> None:
        """Handle the end of a member; its group may have been closed meanwhile."""
        if trajectory.purpose is Purpose.TRAIN:
            self._measure(trajectory, outcome)
            self._set_timer()
        if trajectory.group not in self._book or trajectory.id not in self._book[trajectory.group].running:
            return  # its group was closed, or put back without it
        group = self._book.member_ended(trajectory.group, trajectory.id, outcome)
        if outcome in TRAINABLE:
            self._kept[trajectory.id] = trajectory
            if trajectory.masked:
                self._book.masked(group.id, trajectory.id)
        if group.ready:
            self._update_ready(group)
        elif group.judged:
            if not group.finished:
                self._judged(group, cause)
        elif group.complete:
            self._complete(group)
        elif group.hopeless:
            self._end_hopeless(group, cause)
        else:
            self._settle(group)

    def _end_hopeless(self, group: OpenGroup, cause: str) -> None:
        cause = f"{group.failed} members failed: {cause}"
        self.end(group, GroupOutcome.FAILED, Outcome.CANCELLED, cause)

    def member_finished(self, trajectory: Trajectory) -> "asyncio.Future[None]":
        """Called once a member has its own rewards; returns a future of those that compare its group."""
        waits = self._scoring.await_group(trajectory)
        group = self._book.get(trajectory.group)
        if group is None or group.judged or trajectory.id not in group.running:
            return waits  # it was stopped
        self._book.member_finished(group.id, trajectory.id)
        if trajectory.purpose is Purpose.TRAIN:
            # What it takes from here on is up to the others: it is no straggler.
            self._was_late[trajectory.id] = self._stragglers.ended(
                trajectory.task, trajectory.id, self._context.now(), result=True
            )
            self._set_timer()
        if group.complete:
            self._complete(group)
        else:
            self._settle(group)
        return waits

    def _judge(self, group: OpenGroup) -> None:
        """Ask for the rewards that compare the members of a group; those that still run are not among them."""
        self._book.judge(group.id)
        members = sorted((self._episodes.trajectory(id) for id in group.finished), key=lambda member: member.member)
        for id in group.unfinished:
            self._episodes.stop_episode(id, Outcome.REDUNDANT, "its group is judged without it")
        self._scoring.score_group(group.id, group.judgements, members)

    def _judged(self, group: OpenGroup, cause: str) -> None:
        """All members of a judged group have ended: with their rewards, lost to the bound, or without a reward."""
        self._scoring.forget_group(group.id)
        if group.kept:
            self._complete(group)
        elif group.hopeless:
            self._end_hopeless(group, cause)
        else:
            self._book.unjudge(group.id)
            self._episodes.schedule()
        self._note_judged()

    def _measure(self, trajectory: Trajectory, outcome: Outcome) -> None:
        """Record the duration of a member, and whether it went missing, for its task."""
        del self._group_of[trajectory.id]
        result = outcome in TRAINABLE
        late = self._was_late.pop(trajectory.id, None)
        if late is None:
            late = self._stragglers.ended(trajectory.task, trajectory.id, self._context.now(), result=result)
        if self._redundancy is None or outcome is Outcome.CANCELLED:
            return
        missing = late or outcome in FAILURES or outcome is Outcome.STALE
        if result or missing:
            decision = self._redundancy.member_ended(trajectory.task, missing=missing)
            if decision is not None:
                self._context.record(RedundancyChanged(self._context.now(), trajectory.task, *decision))

    # Ready groups.

    def _complete(self, group: OpenGroup) -> None:
        if group.purpose is Purpose.EVAL:
            if group.finished:
                self._judge(group)
                return
            (id,) = group.kept
            self._evaluation.scored(self._kept[id])
            self.end(group, GroupOutcome.EVALUATED, Outcome.CANCELLED, "")
        elif group.enough:
            self._make_ready(group)
        else:
            self._end_stale(group)  # of its results too many are masked

    def _make_ready(self, group: OpenGroup) -> None:
        """A group with enough results is judged, if its rewards need that; then it goes to the buffer, or is filtered
        out."""
        if group.oldest_kept is None:
            self.end(group, GroupOutcome.FILTERED, Outcome.REDUNDANT, "no member sampled a token to train")
            return
        if group.finished:
            self._judge(group)
            return
        reason = self._refused(group)
        if reason is not None:
            self.end(group, GroupOutcome.FILTERED, Outcome.REDUNDANT, reason)
            return
        self._book.set_ready(group.id, True)
        self.buffer.add(self._as_ready(group))

    def _update_ready(self, group: OpenGroup) -> None:
        self.buffer.replace(self._as_ready(group))

    def _unready(self, group: OpenGroup) -> None:
        """A ready group starts members again."""
        self.buffer.remove(group.id)
        self._book.set_ready(group.id, False)

    def _as_ready(self, group: OpenGroup) -> ReadyGroup:
        oldest = group.oldest_kept
        if oldest is None:
            raise InvariantBroken(f"group {group.id} has nothing to train")
        return ReadyGroup(group.id, group.task, oldest)

    def _refused(self, group: OpenGroup) -> str | None:
        """Reason to filter a group out, if there is one."""
        if not self._context.config.algorithm.filter_zero_variance:
            return None
        reason = has_no_signal([self._kept[id] for id in group.kept])
        return reason if reason is not None and self.buffer.shares.refuse(group.task) else None

    # Claims.

    def take(self, group: GroupId) -> ClaimedGroup:
        entry = self._book.close(group)
        if any(id in entry.kept for id in entry.past_bound(self._served())):
            raise InvariantBroken(f"group {group} of {entry.oldest_kept} would be claimed at {self._served()}")
        return ClaimedGroup(entry, [self._kept.pop(id) for id in entry.kept])

    def batch_claimed(self, claimed: Sequence[ClaimedGroup]) -> None:
        """Stop members that the claim left out; where rollout drains at an update, end all other groups as well."""
        self._pace.claimed(self._context.now())
        for entry in claimed:
            for id in list(entry.group.running):
                self._episodes.stop_episode(id, Outcome.REDUNDANT, "its group was claimed")
        self._reset_timer()
        if not self._context.mode.interrupt:
            for group in self._book.groups():
                if group.purpose is Purpose.TRAIN:
                    self.end(group, GroupOutcome.REDUNDANT, Outcome.REDUNDANT, "the batch is full")
        self._episodes.schedule()

    def put_back(self, claimed: ClaimedGroup) -> None:
        self._book.put_back(claimed.group)
        self._kept.update((trajectory.id, trajectory) for trajectory in claimed.trajectories)

    def shares_changed(self) -> None:
        self._episodes.schedule()

    # Ends of groups.

    def trained(self, groups: Sequence[OpenGroup]) -> None:
        """Record the end of the trained groups of a claim."""
        for group in groups:
            self._record_end(group, GroupOutcome.TRAINED, requeued=False, cause="")

    def roll_back(self, step: int, generating: Callable[[Trajectory], bool]) -> None:
        """Cancel every group that has, or may still get, tokens of weights later than `step`."""
        groups = self._book.groups()
        served_later = bool(groups) and self._served().step > step
        for group in groups:
            running = [self._episodes.trajectory(id) for id in group.running]
            kept = [self._kept[id] for id in group.kept]
            if any(beyond(trajectory, step) for trajectory in [*running, *kept]) or (
                served_later and any(map(generating, running))
            ):
                self.end(group, GroupOutcome.CANCELLED, Outcome.CANCELLED, "rollback")
        self.buffer.steps_claimed = step

    def cancel_all(self, cause: str) -> None:
        for group in self._book.groups():
            self.end(group, GroupOutcome.CANCELLED, Outcome.CANCELLED, cause)
        self._stop_timer()

    def end(self, group: OpenGroup, outcome: GroupOutcome, members: Outcome, cause: str) -> None:
        """End a group without training it, and stop its running members; requeue its prompt unless it is spent."""
        self._book.close(group.id)
        self._scoring.forget_group(group.id)
        if group.ready:
            self.buffer.remove(group.id)
        for id in group.kept:
            del self._kept[id]
        for id in list(group.running):
            self._episodes.stop_episode(id, members, cause)
        ticket = group.requeued(failed=outcome is GroupOutcome.FAILED, stale=outcome is GroupOutcome.STALE)
        spent = (
            outcome in (GroupOutcome.FILTERED, GroupOutcome.EVALUATED)
            or group.purpose is Purpose.EVAL
            or (outcome is GroupOutcome.FAILED and (members is Outcome.STALE or ticket.failures >= MAX_PROMPT_ATTEMPTS))
        )
        if not spent:
            self.tickets.put(ticket)
        if group.purpose is Purpose.EVAL and outcome is not GroupOutcome.EVALUATED:
            self._evaluation.failed(group.task)
        self._record_end(group, outcome, requeued=not spent, cause=cause)
        self._note_judged()
        self._episodes.schedule()

    def _record_end(self, group: OpenGroup, outcome: GroupOutcome, *, requeued: bool, cause: str) -> None:
        self._context.record(GroupEnded(self._context.now(), group.id, outcome, requeued, cause))


def group_rules(config: RunConfig) -> GroupRules:
    """Group rules of a run, as journalled."""
    return GroupRules(
        min_size=config.batch.minimum,
        max_extra=config.max_extra,
        alpha={task: config.alpha_of(task) for task in config.tasks},
        late_alpha={task: config.late_alpha_of(task) for task in config.tasks},
        stale_retries={task: settings.stale_retries for task, settings in config.tasks.items()},
    )


def beyond(trajectory: Trajectory, step: int) -> bool:
    """Whether a trajectory has tokens that were sampled with weights later than `step`."""
    return trajectory.last_version is not None and trajectory.last_version.step > step
