"""The rollout scheduler: which trajectory starts when, and what becomes of its group.

It starts as much as admission allows and environments can hold, per task; replaces members that failed; and gives every
started trajectory and every opened group exactly one end. Training and evaluation share everything below.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from rollart.control.buffer import SampleBuffer, beyond
from rollart.control.context import Context
from rollart.control.credit import has_no_signal, keeps_states
from rollart.control.environments import EnvironmentPool
from rollart.control.episode import EnvManager, Stage, Stopped
from rollart.control.evaluation import Evaluation
from rollart.control.gates import BarrierGate, RewardGate
from rollart.control.proxy import LLMProxy
from rollart.control.rewards import RewardDispatch
from rollart.policy.admission import batches_in_the_making, groups_to_start
from rollart.policy.groups import MAX_PROMPT_ATTEMPTS, GroupBook, OpenGroup
from rollart.policy.staleness import StalenessBound
from rollart.ports.prompts import PromptSource
from rollart.types.errors import RunError
from rollart.types.ids import GroupId, TrajectoryId
from rollart.types.journal import GroupEnded, GroupOpened, PromptTaken, TrajectoryEnded, TrajectoryStarted
from rollart.types.trajectory import TRAINABLE, GroupOutcome, Outcome, Purpose, StaleTreatment, Ticket, Trajectory
from rollart.types.versions import Version

Accept = Callable[[Sequence[Trajectory]], str | None]
"""Looks at a complete group; a reason filters it out, None accepts it."""
Ended = Callable[[Trajectory, str], None]
"""Looks at a trajectory that ended, with the cause if it has no result. Nothing depends on it, and it never raises."""


def accept_all(trajectories: Sequence[Trajectory]) -> str | None:  # noqa: ARG001
    """The default hook."""
    return None


def look_at_none(trajectory: Trajectory, cause: str) -> None:
    """The default hook."""


class RolloutScheduler:
    """See the module."""

    def __init__(
        self,
        context: Context,
        *,
        proxy: LLMProxy,
        environments: EnvironmentPool,
        rewards: RewardDispatch,
        buffer: SampleBuffer,
        bound: StalenessBound,
        served: Callable[[], Version],
        prompts: Mapping[str, PromptSource],
        evaluation: Evaluation,
        accept: Accept,
        ended: Ended,
        stop_tokens: tuple[int, ...],
    ) -> None:
        self._context = context
        self._environments = environments
        self._buffer = buffer
        self._bound = bound
        self._served = served
        self._prompts = prompts
        self._accept = accept
        self._ended = ended
        self._evaluation = evaluation
        self._reward_gate = RewardGate(context) if context.mode.reward_after_rollout else None
        self._stage = Stage(
            context,
            proxy,
            environments,
            rewards,
            BarrierGate(context) if context.mode.environment_barrier else None,
            self._reward_gate,
            stop_tokens,
            first_token=self._first_token,
            check_bound=self._check_bound,
            episode_over=self._episode_over,
            ended=self._trajectory_ended,
        )
        self._book = GroupBook()
        self._tickets: dict[str, deque[Ticket]] = {task: deque() for task in context.config.tasks}
        self._managers: dict[TrajectoryId, EnvManager] = {}
        self._kept: dict[TrajectoryId, Trajectory] = {}
        state = context.lineage.state()
        self._next_trajectory = state.next_trajectory
        self._next_group = state.next_group
        self._next_ticket_number = state.next_ticket
        self._proxy = proxy
        for task, cursor in state.cursors.items():
            prompts[task].seek(cursor)
        self._open = False
        self._pumping = False
        self._drained: asyncio.Future[None] | None = None
        environments.changed = self.poke
        buffer.ended = self._ready_group_ended
        buffer.needs_changed = self.poke
        buffer.claimed = self.claimed
        evaluation.opened = self.poke
        proxy.first_token = self._first_token

    # What the pipeline and the buffer ask for.

    def start(self) -> None:
        """Rollout begins, or goes on after `halt`: with the prompts that wait in the lineage, then with new ones."""
        for queue in self._tickets.values():
            queue.clear()
        for ticket in self._context.lineage.state().waiting:
            self._tickets[ticket.prompt.task].append(ticket)
        self._open = True
        self.poke()

    def roll_back(self, step: int) -> None:
        """The lineage goes on from `step`: what has, or may yet get, tokens of later weights is void."""
        groups = self._book.groups()
        served_later = bool(groups) and self._served().step > step
        for group in groups:
            running = [self._managers[id].trajectory for id in group.running]
            kept = [self._kept[id] for id in group.kept]
            if any(beyond(trajectory, step) for trajectory in [*running, *kept]) or (
                served_later and any(map(self._proxy.generating, running))
            ):
                self._end_group(group, GroupOutcome.CANCELLED, Outcome.CANCELLED, "rollback")
        self._buffer.roll_back(step)

    def claimed(self) -> None:
        """One more batch is claimed. Where rollout is drained, what is left over is redundant."""
        if not self._context.mode.interrupt:
            self._buffer.drop_all(GroupOutcome.REDUNDANT, "the batch is full")
            for group in self._book.groups():
                if group.purpose is Purpose.TRAIN:
                    self._end_group(group, GroupOutcome.REDUNDANT, Outcome.REDUNDANT, "the batch is full")
        self.poke()

    def version_changed(self) -> None:
        """Engines serve another version: what is past the bound now does not go on."""
        for group in self._book.groups():
            if group.purpose is Purpose.TRAIN and self._bound.violated(self._served(), group.oldest):
                self._handle_stale(group)
        self._buffer.evict_stale()
        self.poke()

    def trained(self, groups: Sequence[OpenGroup]) -> None:
        """The groups of a claim are trained."""
        for group in groups:
            self._record_group_end(group, GroupOutcome.TRAINED, requeued=False, cause="")

    def halt(self) -> None:
        """Nothing starts any more."""
        self._open = False

    async def drained(self) -> None:
        """Return once no trajectory runs. Those that were stopped end in the next passes of the loop."""
        while self._managers:
            self._drained = self._context.loop.create_future()
            await self._context.waits.wait(
                self._drained,
                "rollout",
                f"the end of {len(self._managers)} trajectories",
                60.0,
                "the run stops",
                RunError,
            )

    def stop(self, cause: str) -> None:
        """Nothing starts any more and everything that runs is cancelled; their ends follow."""
        self.halt()
        for group in self._book.groups():
            self._end_group(group, GroupOutcome.CANCELLED, Outcome.CANCELLED, cause)
        self._buffer.drop_all(GroupOutcome.CANCELLED, cause)

    # Starting.

    def poke(self) -> None:
        """Something changed: look once, after this pass of the loop, what may start."""
        if not self._pumping and self._open:
            self._pumping = True
            self._context.call_soon(self._pump)

    def _pump(self) -> None:
        self._pumping = False
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
        claims = self._buffer.steps_claimed
        batches = batches_in_the_making(
            context.mode, alpha=context.config.alpha, served=self._served().step, claims=claims
        )
        shares = self._buffer.shares
        return groups_to_start(
            batches=min(batches, context.config.steps - claims),
            current=shares.need,
            usual=shares.usual(),
            in_the_making={task: self._book.training(task) + self._buffer.ready(task) for task in context.config.tasks},
            extra=context.config.batch.extra_groups,
        )

    def _start_one(self, task: str, allowed: dict[str, int]) -> bool:
        """Start a trajectory of a task: evaluation first, then groups that are short, then a new group."""
        ticket = self._evaluation.next(task)
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
        manager = EnvManager(self._stage, trajectory, slot, self._context.config.tasks[group.task])
        self._managers[id] = manager
        self._count_episode(trajectory, +1)
        self._context.nursery.start(manager.run(), f"trajectory-{id}")

    # What episodes tell.

    def _first_token(self, trajectory: Trajectory, version: Version) -> None:
        if trajectory.group in self._book:
            self._book.first_token(trajectory.group, trajectory.id, version)

    def _check_bound(self, trajectory: Trajectory) -> None:
        """At every turn: past the bound a trajectory ends as stale, or goes on with its tokens masked."""
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

    def _episode_over(self, manager: EnvManager, fault: str | None) -> None:
        self._count_episode(manager.trajectory, -1)
        self._environments.release(manager.slot, fault)
        self.poke()

    def _trajectory_ended(self, manager: EnvManager, outcome: Outcome, cause: str) -> None:
        """The one door through which every started trajectory leaves."""
        trajectory = manager.trajectory
        del self._managers[trajectory.id]
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
            )
        )
        self._ended(trajectory, cause)
        if outcome in TRAINABLE:
            self._environments.played(trajectory.task)
        if trajectory.group in self._book:
            self._member_ended(trajectory, outcome, cause)
        if not self._managers and self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        self.poke()

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

    # What becomes of groups.

    def _complete(self, group: OpenGroup) -> None:
        trajectories = [self._kept[id] for id in group.kept]
        if group.purpose is Purpose.EVAL:
            self._evaluation.scored(trajectories[0])
            self._end_group(group, GroupOutcome.EVALUATED, Outcome.CANCELLED, "")
            return
        # By those who are kept: how old the ones are that still run, and are redundant now, does not matter any more.
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
        self._buffer.add(group, trajectories)

    def _refused(self, task: str, trajectories: Sequence[Trajectory]) -> str | None:
        """Why a complete group is not worth a place in a batch, if it is not."""
        if self._context.config.algorithm.filter_zero_variance:
            reason = has_no_signal(trajectories)
            if reason is not None and self._buffer.shares.refuse(task):
                return reason
        return self._accept(trajectories)

    def _handle_stale(self, group: OpenGroup) -> None:
        """An open group whose oldest member is past the bound."""
        if self._context.config.tasks[group.task].stale is StaleTreatment.ABORT:
            self._end_group(group, GroupOutcome.STALE, Outcome.STALE, "past the staleness bound at an update")
            return
        for id, first in [*group.running.items(), *group.kept.items()]:
            if self._bound.violated(self._served(), first):
                self._mask(self._kept[id] if id in self._kept else self._managers[id].trajectory)

    def _end_group(self, group: OpenGroup, outcome: GroupOutcome, members: Outcome, cause: str) -> None:
        """The group ends without a batch; whoever still runs for it is stopped."""
        self._close(group, members, cause)
        self._ready_group_ended(group, outcome, cause)

    def _close(self, group: OpenGroup, members: Outcome, cause: str) -> None:
        """The group leaves the book; whoever still runs for it is stopped."""
        self._book.close(group.id)
        for id in group.kept:
            self._kept.pop(id, None)
        for id in list(group.running):
            self._managers[id].stop(members, cause)

    def _ready_group_ended(self, group: OpenGroup, outcome: GroupOutcome, cause: str) -> None:
        """A group ended untrained: its prompt is queued again, unless it is spent."""
        failed = outcome is GroupOutcome.FAILED
        ticket = group.requeued(failed=failed)
        spent = outcome in (GroupOutcome.FILTERED, GroupOutcome.EVALUATED) or group.purpose is Purpose.EVAL
        requeued = not spent and ticket.failures < MAX_PROMPT_ATTEMPTS
        if requeued:
            self._tickets[group.task].append(ticket)
        if group.purpose is Purpose.EVAL and outcome is not GroupOutcome.EVALUATED:
            self._evaluation.failed(group.task)
        self._record_group_end(group, outcome, requeued=requeued, cause=cause)
        self.poke()

    def _record_group_end(self, group: OpenGroup, outcome: GroupOutcome, *, requeued: bool, cause: str) -> None:
        self._context.record(GroupEnded(self._context.now(), group.id, outcome, requeued, cause))

    # Accounts.

    def _count_episode(self, trajectory: Trajectory, change: int) -> None:
        accounts = self._context.accounts
        if trajectory.purpose is Purpose.TRAIN:
            accounts.in_episode += change
            accounts.changed(self._context.now())

    def _set_idle_cause(self) -> None:
        """Why an environment has nothing to do: its agent thinks, or nothing more may start."""
        accounts = self._context.accounts
        cause = "generation" if accounts.in_episode else "admission"
        accounts.idle_for("environments", cause, self._context.now())
