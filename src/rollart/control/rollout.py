"""The rollout scheduler: which trajectory starts when.

It starts as much as admission allows and environments can hold, per task, and replaces members that are missing. Every
started trajectory ends exactly once; `control.groups` decides what becomes of groups. Training and evaluation share the
whole path.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence

from rollart.control.context import Context
from rollart.control.credit import keeps_states
from rollart.control.environments import EnvironmentPool
from rollart.control.episode import Episode, EpisodeServices, Stopped
from rollart.control.evaluation import Evaluation
from rollart.control.fleet import Fleet
from rollart.control.gates import BarrierGate, RewardGate
from rollart.control.groups import PAST_BOUND, Groups
from rollart.control.proxy import LLMProxy
from rollart.control.rewards import RewardDispatch
from rollart.control.scoring import Scoring
from rollart.policy.admission import batches_in_the_making, groups_to_start
from rollart.policy.groups import OpenGroup
from rollart.policy.rewards import RewardPlans
from rollart.ports.prompts import PromptSource
from rollart.types.errors import RunError
from rollart.types.ids import TrajectoryId
from rollart.types.journal import PromptTaken, TimeUse, TrajectoryEnded, TrajectoryStarted
from rollart.types.trajectory import TRAINABLE, Outcome, Purpose, Ticket, Trajectory
from rollart.types.versions import Version

OnTrajectoryEnd = Callable[[Trajectory, str], None]
"""Hook called with every ended trajectory, and the cause if it has no result. It must not raise."""


def ignore_trajectory(trajectory: Trajectory, cause: str) -> None:
    """The default hook."""


class RolloutScheduler:
    """Starts trajectories; see the module. Owns and observes environments, groups, evaluation and episodes."""

    def __init__(
        self,
        context: Context,
        *,
        fleet: Fleet,
        proxy: LLMProxy,
        served: Callable[[], Version],
        prompts: Mapping[str, PromptSource],
        eval_prompts: Mapping[str, PromptSource],
        rewards: RewardPlans,
        on_trajectory_end: OnTrajectoryEnd,
        stop_tokens: tuple[int, ...],
    ) -> None:
        self._context = context
        self._proxy = proxy
        self._served = served
        self._prompts = prompts
        self._on_trajectory_end = on_trajectory_end
        self._environments = EnvironmentPool(context, fleet, slot_freed=self.schedule)
        self.evaluation = Evaluation(context, eval_prompts, episodes_waiting=self.schedule)
        scoring = Scoring(context, RewardDispatch(context, fleet), rewards)
        self._groups = Groups(context, served, self, self.evaluation, scoring)
        self.buffer = self._groups.buffer
        self._reward_gate = RewardGate(context) if context.mode.reward_after_rollout else None
        self._services = EpisodeServices(
            context,
            proxy,
            self._environments,
            scoring,
            BarrierGate(context) if context.mode.environment_barrier else None,
            self._reward_gate,
            stop_tokens,
            owner=self,
        )
        self._episodes: dict[TrajectoryId, Episode] = {}
        state = context.lineage.state()
        self._next_trajectory = state.next_trajectory
        self._next_ticket_number = state.next_ticket
        for task, cursor in state.cursors.items():
            prompts[task].seek(cursor)
        self._open = False
        self._scheduled = False
        self._drained: asyncio.Future[None] | None = None

    # What the pipeline asks for.

    def start(self) -> None:
        """Begin, or continue after `halt`: first with the prompts that wait in the lineage, then with new ones."""
        self._groups.tickets.clear()
        for ticket in self._context.lineage.state().waiting:
            self._groups.tickets.put(ticket)
        self._open = True
        self.schedule()

    def roll_back(self, step: int) -> None:
        """Cancel every group that has, or may still get, tokens of weights later than `step`."""
        self._groups.roll_back(step, self._proxy.generating)

    def version_changed(self) -> None:
        """End or mask what the new version put past the staleness bound."""
        self._groups.version_changed()
        self.schedule()

    def trained(self, groups: Sequence[OpenGroup]) -> None:
        """Record the end of the trained groups of a claim."""
        self._groups.trained(groups)

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
        self._groups.cancel_all(cause)

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
        accounts.admission_open = any(allowed.values()) or any(map(self._groups.short_of_members, allowed))
        accounts.changed(self._context.now())
        self._set_idle_cause()
        if self._reward_gate is not None and not accounts.in_episode:
            self._reward_gate.open()

    def _allowed(self) -> dict[str, int]:
        """Groups of each task that may be opened now."""
        context, shares = self._context, self.buffer.shares
        claims, served = self.buffer.steps_claimed, self._served().step
        batches = {
            task: batches_in_the_making(context.mode, alpha=context.config.alpha_of(task), served=served, claims=claims)
            for task in context.config.tasks
        }
        return groups_to_start(
            batches={task: min(count, context.config.steps - claims) for task, count in batches.items()},
            current=shares.need,
            usual=shares.usual(),
            in_the_making={task: self._groups.in_the_making(task) for task in context.config.tasks},
            extra=context.config.batch.extra_groups,
        )

    def _start_one(self, task: str, allowed: dict[str, int]) -> bool:
        """Start one trajectory of a task: evaluation first, then groups short of members, then a new group."""
        ticket = self.evaluation.next(task)
        if ticket is not None:
            self._start_member(self._groups.open(ticket, Purpose.EVAL))
            return True
        group = self._groups.short_of_members(task)
        if group is None and allowed[task]:
            allowed[task] -= 1
            group = self._groups.open(self._next_ticket(task), Purpose.TRAIN)
        if group is None:
            return False
        self._start_member(group)
        return True

    def _next_ticket(self, task: str) -> Ticket:
        waiting = self._groups.tickets.take(task)
        if waiting is not None:
            return waiting
        source = self._prompts[task]
        ticket = Ticket(self._next_ticket_number, source.next())
        self._next_ticket_number += 1
        self._context.record(PromptTaken(self._context.now(), ticket.number, ticket.prompt, source.cursor()))
        return ticket

    def _start_member(self, group: OpenGroup) -> None:
        id = TrajectoryId(self._next_trajectory)
        self._next_trajectory += 1
        member = self._groups.member_started(group, id)
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
        self._groups.first_token(trajectory, version)

    def check_bound(self, trajectory: Trajectory) -> None:
        """Past the bound a trajectory ends as stale, or continues with its tokens masked."""
        if self._groups.past_bound(trajectory):
            # Its group may have stopped it already, as redundant.
            raise self._episodes[trajectory.id].stopped or Stopped(Outcome.STALE, PAST_BOUND)

    def episode_finished(self, trajectory: Trajectory) -> "asyncio.Future[None]":
        return self._groups.member_finished(trajectory)

    def episode_over(self, episode: Episode, fault: str | None) -> None:
        self._count_episode(episode.trajectory, -1)
        if not episode.abandons:
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
        self._groups.member_ended(trajectory, outcome, cause)
        if not self._episodes and self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        self.schedule()

    # What groups ask for.

    def stop_episode(self, trajectory: TrajectoryId, outcome: Outcome, cause: str) -> None:
        self._episodes[trajectory].stop(outcome, cause)

    def trajectory(self, id: TrajectoryId) -> Trajectory:
        return self._episodes[id].trajectory

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
