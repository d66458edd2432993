"""The rollout scheduler: which trajectory starts when, and how its group ends.

It starts as much as admission allows and environments can hold, per task, and replaces failed members. Every started
trajectory and every opened group ends exactly once. Training and evaluation share the whole path.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from rollart.control.buffer import SampleBuffer, beyond
from rollart.control.context import Context
from rollart.control.credit import has_no_signal, keeps_states
from rollart.control.environments import EnvironmentPool
from rollart.control.episode import Episode, EpisodeServices, Stopped
from rollart.control.evaluation import Evaluation
from rollart.control.fleet import Fleet
from rollart.control.gates import BarrierGate, RewardGate
from rollart.control.proxy import LLMProxy
from rollart.control.rewards import RewardDispatch
from rollart.policy.admission import batches_in_the_making, groups_to_start
from rollart.policy.groups import MAX_PROMPT_ATTEMPTS, GroupBook, OpenGroup
from rollart.policy.staleness import StalenessBound
from rollart.ports.prompts import PromptSource
from rollart.types.errors import RunError
from rollart.types.ids import GroupId, TrajectoryId
from rollart.types.journal import GroupEnded, GroupOpened, PromptTaken, TimeUse, TrajectoryEnded, TrajectoryStarted
from rollart.types.trajectory import TRAINABLE, GroupOutcome, Outcome, Purpose, StaleTreatment, Ticket, Trajectory
from rollart.types.versions import Version

OnTrajectoryEnd = Callable[[Trajectory, str], None]
"""Hook called with every ended trajectory, and the cause if it has no result. It must not raise."""


def ignore_trajectory(trajectory: Trajectory, cause: str) -> None:
    """The default hook."""


class RolloutScheduler:
    """See the module. It owns what only rollout uses, and observes it: environments, buffer, evaluation, episodes."""

    def __init__(
        self,
        context: Context,
        *,
        fleet: Fleet,
        proxy: LLMProxy,
        served: Callable[[], Version],
        prompts: Mapping[str, PromptSource],
        eval_prompts: Mapping[str, PromptSource],
        on_trajectory_end: OnTrajectoryEnd,
        stop_tokens: tuple[int, ...],
    ) -> None:
        self._context = context
        self._proxy = proxy
        self._served = served
        self._prompts = prompts
        self._on_trajectory_end = on_trajectory_end
        self._bound = StalenessBound(context.config.alpha, context.mode.check_every_turn)
        self._environments = EnvironmentPool(context, fleet, slot_freed=self.schedule)
        self.buffer = SampleBuffer(context, self._bound, served, observer=self)
        self.evaluation = Evaluation(context, eval_prompts, episodes_waiting=self.schedule)
        self._reward_gate = RewardGate(context) if context.mode.reward_after_rollout else None
        self._services = EpisodeServices(
            context,
            proxy,
            self._environments,
            RewardDispatch(context, fleet),
            BarrierGate(context) if context.mode.environment_barrier else None,
            self._reward_gate,
            stop_tokens,
            owner=self,
        )
        self._book = GroupBook()
        self._tickets: dict[str, deque[Ticket]] = {task: deque() for task in context.config.tasks}
        self._episodes: dict[TrajectoryId, Episode] = {}
        self._kept: dict[TrajectoryId, Trajectory] = {}
        state = context.lineage.state()
        self._next_trajectory = state.next_trajectory
        self._next_group = state.next_group
        self._next_ticket_number = state.next_ticket
        for task, cursor in state.cursors.items():
            prompts[task].seek(cursor)
        self._open = False
        self._scheduled = False
        self._drained: asyncio.Future[None] | None = None

    # What the pipeline asks for.

    def start(self) -> None:
        """Begin, or continue after `halt`: first with the prompts that wait in the lineage, then with new ones."""
        for queue in self._tickets.values():
            queue.clear()
        for ticket in self._context.lineage.state().waiting:
            self._tickets[ticket.prompt.task].append(ticket)
        self._open = True
        self.schedule()

    def roll_back(self, step: int) -> None:
        """Cancel every group that has, or may still get, tokens of weights later than `step`."""
        groups = self._book.groups()
        served_later = bool(groups) and self._served().step > step
        for group in groups:
            running = [self._episodes[id].trajectory for id in group.running]
            kept = [self._kept[id] for id in group.kept]
            if any(beyond(trajectory, step) for trajectory in [*running, *kept]) or (
                served_later and any(map(self._proxy.generating, running))
            ):
                self._end_group(group, GroupOutcome.CANCELLED, Outcome.CANCELLED, "rollback")
        self.buffer.roll_back(step)

    def version_changed(self) -> None:
        """End or mask what the new version put past the staleness bound."""
        for group in self._book.groups():
            if group.purpose is Purpose.TRAIN and self._bound.violated(self._served(), group.oldest):
                self._handle_stale(group)
        self.buffer.evict_stale()
        self.schedule()

    def trained(self, groups: Sequence[OpenGroup]) -> None:
        """Record the end of the trained groups of a claim."""
        for group in groups:
            self._record_group_end(group, GroupOutcome.TRAINED, requeued=False, cause="")

    def halt(self) -> None:
        """Start nothing more."""
        self._open = False

    async def drained(self) -> None:
        """Return once no trajectory runs. Stopped ones end in the next passes of the loop."""
        while self._episodes:
            self._drained = self._context.loop.create_future()
            await self._context.waits.wait(
                self._drained,
                "rollout",
                f"the end of {len(self._episodes)} trajectories",
                60.0,
                "the run stops",
                RunError,
            )

    def stop(self, cause: str) -> None:
        """Start nothing more and cancel everything that runs."""
        self.halt()
        for group in self._book.groups():
            self._end_group(group, GroupOutcome.CANCELLED, Outcome.CANCELLED, cause)
        self.buffer.drop_all(GroupOutcome.CANCELLED, cause)

    # Starting.

    def schedule(self) -> None:
        """Check what may start, once, after this pass of the loop."""
        if not self._scheduled and self._open:
            self._scheduled = True
            self._context.call_soon(self._start_ready)

    def _start_ready(self) -> None:
        self._scheduled = False
        if not self._open:
            return
        allowed = self._allowed()
        for task in self._context.config.tasks:
            while self._environments.free(task) and self._start_one(task, allowed):
                pass
        accounts = self._context.accounts
        accounts.admission_open = any(allowed.values()) or any(map(self._book.short_of_members, allowed))
        accounts.changed(self._context.now())
        self._set_idle_cause()
        if self._reward_gate is not None and not accounts.in_episode:
            self._reward_gate.open()

    def _allowed(self) -> dict[str, int]:
        """Groups of each task that may be opened now."""
        context = self._context
        claims = self.buffer.steps_claimed
        batches = batches_in_the_making(
            context.mode, alpha=context.config.alpha, served=self._served().step, claims=claims
        )
        shares = self.buffer.shares
        return groups_to_start(
            batches=min(batches, context.config.steps - claims),
            current=shares.need,
            usual=shares.usual(),
            in_the_making={task: self._book.training(task) + self.buffer.ready(task) for task in context.config.tasks},
            extra=context.config.batch.extra_groups,
        )

    def _start_one(self, task: str, allowed: dict[str, int]) -> bool:
        """Start one trajectory of a task: evaluation first, then groups short of members, then a new group."""
        ticket = self.evaluation.next(task)
        if ticket is not None:
            self._start_member(self._open_group(ticket, Purpose.EVAL))
            return True
        group = self._book.short_of_members(task)
        if group is None and allowed[task]:
            allowed[task] -= 1
            group = self._open_group(self._next_ticket(task), Purpose.TRAIN)
        if group is None:
            return False
        self._start_member(group)
        return True

    def _next_ticket(self, task: str) -> Ticket:
        if self._tickets[task]:
            return self._tickets[task].popleft()
        source = self._prompts[task]
        ticket = Ticket(self._next_ticket_number, source.next())
        self._next_ticket_number += 1
        self._context.record(PromptTaken(self._context.now(), ticket.number, ticket.prompt, source.cursor()))
        return ticket

    def _open_group(self, ticket: Ticket, purpose: Purpose) -> OpenGroup:
        id = GroupId(self._next_group)
        self._next_group += 1
        batch = self._context.config.batch
        size, extra = (batch.group_size, batch.extra_members) if purpose is Purpose.TRAIN else (1, 0)
        prompt = ticket.prompt
        self._context.record(
            GroupOpened(self._context.now(), id, prompt.task, prompt.id, purpose, ticket.number, ticket.attempt)
        )
        return self._book.open(id, ticket, purpose, size=size, extra=extra)

    def _start_member(self, group: OpenGroup) -> None:
        id = TrajectoryId(self._next_trajectory)
        self._next_trajectory += 1
        member = self._book.member_started(group.id, id)
        trajectory = Trajectory(
            id=id,
            group=group.id,
            member=member,
            attempt=group.ticket.attempt,
            task=group.task,
            purpose=group.purpose,
            prompt=group.ticket.prompt,
            keeps_states=keeps_states(self._context.config.algorithm),
        )
        slot = self._environments.take(group.task)
        self._context.record(
            TrajectoryStarted(self._context.now(), id, group.id, member, group.ticket.attempt, slot.name)
        )
        episode = Episode(self._services, trajectory, slot, self._context.config.tasks[group.task])
        self._episodes[id] = episode
        self._count_episode(trajectory, +1)
        self._context.nursery.start(episode.run(), f"trajectory-{id}")

    # What episodes report.

    def first_token(self, trajectory: Trajectory, version: Version) -> None:
        if trajectory.group in self._book:
            self._book.first_token(trajectory.group, trajectory.id, version)

    def check_bound(self, trajectory: Trajectory) -> None:
        """Past the bound a trajectory ends as stale, or continues with its tokens masked."""
        if trajectory.purpose is Purpose.EVAL or trajectory.masked:
            return
        if self._bound.violated(self._served(), trajectory.first_version):
            if self._context.config.tasks[trajectory.task].stale is StaleTreatment.ABORT:
                raise Stopped(Outcome.STALE, "past the staleness bound")
            self._mask(trajectory)

    def _mask(self, trajectory: Trajectory) -> None:
        trajectory.masked = True
        if trajectory.group in self._book:
            self._book.masked(trajectory.group, trajectory.id)

    def episode_over(self, episode: Episode, fault: str | None) -> None:
        self._count_episode(episode.trajectory, -1)
        self._environments.release(episode.slot, fault)
        self.schedule()

    def trajectory_ended(self, episode: Episode, outcome: Outcome, cause: str) -> None:
        """The one door through which every started trajectory leaves."""
        trajectory = episode.trajectory
        del self._episodes[trajectory.id]
        self._context.record(
            TrajectoryEnded(
                self._context.now(),
                trajectory.id,
                outcome,
                trajectory.turns,
                trajectory.sampled_tokens,
                trajectory.reward,
                trajectory.first_version,
                trajectory.last_version,
                trajectory.masked,
                cause,
                trajectory.failure,
            )
        )
        self._on_trajectory_end(trajectory, cause)
        if outcome in TRAINABLE:
            self._environments.played(trajectory.task)
        if trajectory.group in self._book:
            self._member_ended(trajectory, outcome, cause)
        if not self._episodes and self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        self.schedule()

    def _member_ended(self, trajectory: Trajectory, outcome: Outcome, cause: str) -> None:
        group = self._book.member_ended(trajectory.group, trajectory.id, outcome)
        if outcome in TRAINABLE:
            self._kept[trajectory.id] = trajectory
        if trajectory.masked:
            self._book.masked(group.id, trajectory.id)
        if outcome is Outcome.STALE:
            self._end_group(group, GroupOutcome.STALE, Outcome.STALE, cause)
        elif group.complete:
            self._complete(group)
        elif group.hopeless:
            self._end_group(group, GroupOutcome.FAILED, Outcome.CANCELLED, f"{group.failed} members failed: {cause}")

    # What the buffer reports.

    def batch_claimed(self) -> None:
        """Where rollout is drained at an update, whatever the batch did not need is redundant."""
        if not self._context.mode.interrupt:
            self.buffer.drop_all(GroupOutcome.REDUNDANT, "the batch is full")
            for group in self._book.groups():
                if group.purpose is Purpose.TRAIN:
                    self._end_group(group, GroupOutcome.REDUNDANT, Outcome.REDUNDANT, "the batch is full")
        self.schedule()

    def shares_changed(self) -> None:
        """Another task may start more groups."""
        self.schedule()

    def group_dropped(self, group: OpenGroup, outcome: GroupOutcome, cause: str) -> None:
        """A ready group left the buffer untrained."""
        self._group_untrained(group, outcome, cause)

    # What becomes of groups.

    def _complete(self, group: OpenGroup) -> None:
        trajectories = [self._kept[id] for id in group.kept]
        if group.purpose is Purpose.EVAL:
            self.evaluation.scored(trajectories[0])
            self._end_group(group, GroupOutcome.EVALUATED, Outcome.CANCELLED, "")
            return
        # Only kept members count: those still running are redundant from here on, however old they are.
        firsts = [member.first_version for member in trajectories if not member.masked]
        if not firsts or any(self._bound.violated(self._served(), first) for first in firsts):
            self._end_group(group, GroupOutcome.STALE, Outcome.STALE, "past the staleness bound when complete")
            return
        if all(member.masked or member.first_version is None for member in trajectories):
            self._end_group(group, GroupOutcome.FILTERED, Outcome.REDUNDANT, "no member sampled a token to train")
            return
        reason = self._refused(group.task, trajectories)
        if reason is not None:
            self._end_group(group, GroupOutcome.FILTERED, Outcome.REDUNDANT, reason)
            return
        self._close(group, Outcome.REDUNDANT, "its group is complete")
        self.buffer.add(group, trajectories)

    def _refused(self, task: str, trajectories: Sequence[Trajectory]) -> str | None:
        """Reason to filter a complete group out, if there is one."""
        if not self._context.config.algorithm.filter_zero_variance:
            return None
        reason = has_no_signal(trajectories)
        return reason if reason is not None and self.buffer.shares.refuse(task) else None

    def _handle_stale(self, group: OpenGroup) -> None:
        """An open group whose oldest member is past the bound."""
        if self._context.config.tasks[group.task].stale is StaleTreatment.ABORT:
            self._end_group(group, GroupOutcome.STALE, Outcome.STALE, "past the staleness bound at an update")
            return
        for id, first in [*group.running.items(), *group.kept.items()]:
            if self._bound.violated(self._served(), first):
                self._mask(self._kept[id] if id in self._kept else self._episodes[id].trajectory)

    def _end_group(self, group: OpenGroup, outcome: GroupOutcome, members: Outcome, cause: str) -> None:
        """End a group without training it, and stop its running members."""
        self._close(group, members, cause)
        self._group_untrained(group, outcome, cause)

    def _close(self, group: OpenGroup, members: Outcome, cause: str) -> None:
        """Remove a group from the book and stop its running members."""
        self._book.close(group.id)
        for id in group.kept:
            self._kept.pop(id, None)
        for id in list(group.running):
            self._episodes[id].stop(members, cause)

    def _group_untrained(self, group: OpenGroup, outcome: GroupOutcome, cause: str) -> None:
        """Record the end of an untrained group; its prompt is queued again unless it is spent."""
        failed = outcome is GroupOutcome.FAILED
        ticket = group.requeued(failed=failed)
        spent = outcome in (GroupOutcome.FILTERED, GroupOutcome.EVALUATED) or group.purpose is Purpose.EVAL
        requeued = not spent and ticket.failures < MAX_PROMPT_ATTEMPTS
        if requeued:
            self._tickets[group.task].append(ticket)
        if group.purpose is Purpose.EVAL and outcome is not GroupOutcome.EVALUATED:
            self.evaluation.failed(group.task)
        self._record_group_end(group, outcome, requeued=requeued, cause=cause)
        self.schedule()

    def _record_group_end(self, group: OpenGroup, outcome: GroupOutcome, *, requeued: bool, cause: str) -> None:
        self._context.record(GroupEnded(self._context.now(), group.id, outcome, requeued, cause))

    # Accounts.

    def _count_episode(self, trajectory: Trajectory, change: int) -> None:
        accounts = self._context.accounts
        if trajectory.purpose is Purpose.TRAIN:
            accounts.in_episode += change
            accounts.changed(self._context.now())

    def _set_idle_cause(self) -> None:
        """Idle environments wait for generation, or for admission."""
        accounts = self._context.accounts
        cause = TimeUse.GENERATION if accounts.in_episode else TimeUse.ADMISSION
        accounts.idle_for("environments", cause, self._context.now())
