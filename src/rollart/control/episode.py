"""One episode of one agent in one environment (the paper's EnvManager).

    reset ─► observation ─► turn (LLMProxy) ─► action ─► step ─► … ─► episode over ─► slot free ─► rewards ─► end

An episode yields exactly one trajectory with exactly one outcome. Every failure is turned into that outcome at one
boundary, `run`; a stop from outside (stale, redundant, cancelled) is an outcome too.
"""

import asyncio
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from rollart.config.tasks import TaskSettings
from rollart.control.context import Context
from rollart.control.environments import POOL, EnvironmentPool, Slot
from rollart.control.gates import BarrierGate, RewardGate
from rollart.control.proxy import FirstTokenObserver, LLMProxy, TurnResult
from rollart.control.scoring import Scoring
from rollart.control.waits import fail
from rollart.policy.seeds import member_key, turn_seed
from rollart.policy.watch import Wait
from rollart.types.errors import EngineFault, EnvironmentFault, InvariantBroken, RewardFault, RollartError
from rollart.types.journal import TurnEnded
from rollart.types.messages import Observed, Sampling
from rollart.types.tokens import EMPTY, Segment
from rollart.types.trajectory import Outcome, Purpose, Trajectory

T = TypeVar("T")


class Stopped(Exception):
    """The episode was stopped from outside."""

    def __init__(self, outcome: Outcome, cause: str) -> None:
        super().__init__(cause)
        self.outcome = outcome
        self.cause = cause


class EpisodeOwner(FirstTokenObserver, Protocol):
    """Decides whether episodes go on, and is notified of their end."""

    def check_bound(self, trajectory: Trajectory) -> None:
        """Called before every turn and at the end; raises `Stopped` where the trajectory may not go on."""

    def episode_finished(self, trajectory: Trajectory) -> "asyncio.Future[None]":
        """Called once the trajectory has its own rewards; returns a future of those that compare its group."""

    def episode_over(self, episode: "Episode", fault: str | None) -> None:
        """Called when the environment is free again; `fault` is its failure, if it failed."""

    def trajectory_ended(self, episode: "Episode", outcome: Outcome, cause: str) -> None:
        """Called once, with the outcome of the trajectory."""


@dataclass(frozen=True, slots=True)
class EpisodeServices:
    """What all episodes of a run share."""

    context: Context
    proxy: LLMProxy
    environments: EnvironmentPool
    scoring: Scoring
    barrier: BarrierGate | None
    reward_gate: RewardGate | None
    stop_tokens: tuple[int, ...]
    owner: EpisodeOwner


class Episode:
    """One episode; see the module.

    Ten thousand episodes wait at once, each for one answer at a time. To keep that cheap, an episode is one coroutine
    that awaits bare futures and reuses a single `Wait`: `_expect`, await, `_arrived`.
    """

    __slots__ = (
        "_action",
        "_barrier",
        "_fault",
        "_in_environment",
        "_in_step",
        "_pending",
        "_reward_gate",
        "_seed_key",
        "_services",
        "_settings",
        "_stop",
        "_truncated",
        "_wait",
        "abandons",
        "slot",
        "trajectory",
    )

    def __init__(self, services: EpisodeServices, trajectory: Trajectory, slot: Slot, settings: TaskSettings) -> None:
        self.trajectory = trajectory
        self.slot = slot
        self._services = services
        self._settings = settings
        self._pending: asyncio.Future[Any] | None = None
        self._wait = Wait(self._expired)
        self._fault: type[RollartError] = EnvironmentFault
        self._stop: Stopped | None = None
        self._in_environment = True
        self._in_step = False
        self.abandons = False
        """Whether it was stopped while its environment works on an answer, which keeps the slot."""
        self._action: Segment | None = None
        """Sampled tokens, until the environment has acted on them."""
        self._truncated = False
        self._seed_key = member_key(services.context.config.seed, trajectory.prompt.seed, trajectory.member)
        # Gates of a mode apply to training only.
        training = trajectory.purpose is Purpose.TRAIN
        self._barrier = services.barrier if training else None
        self._reward_gate = services.reward_gate if training else None

    def __str__(self) -> str:
        """Owner of the current wait: the trajectory or, during a step, its environment slot."""
        name = f"trajectory {self.trajectory.id}"
        return f"{self.slot.name} for {name}" if self._in_step else name

    @property
    def stopped(self) -> Stopped | None:
        """How it was stopped from outside, if it was."""
        return self._stop

    def stop(self, outcome: Outcome, cause: str) -> None:
        """End the episode with this outcome at once, wherever it is. The first stop counts."""
        if self._stop is None:
            self._stop = Stopped(outcome, cause)
            if self._pending is not None and not self._pending.done():
                self._pending.set_exception(self._stop)

    async def run(self) -> None:
        """Play until the environment or a limit of the agent ends the episode, then get the reward.

        A single coroutine, because each turn wakes it twice and nested coroutines would multiply that cost. No answer
        is kept in a local variable across an await: ten thousand of them would be cold memory.
        """
        trajectory, services, barrier = self.trajectory, self._services, self._barrier
        outcome, cause = Outcome.CANCELLED, "the run ended"
        fault: str | None = None
        try:
            if barrier is not None:
                barrier.join(trajectory.id)
            over = self._take(await self._reset())
            while not over:
                if barrier is not None:
                    await self._at_barrier(barrier)
                services.owner.check_bound(trajectory)
                self._take_turn(await self._ask_turn())
                if barrier is not None:
                    await self._at_barrier(barrier)
                over = self._take(await self._step())
            services.owner.check_bound(trajectory)
            self._leave_environment(None)
            await self._reward(self._truncated)
            if self._stop is not None:
                # The reward arrived in the same pass of the loop, but the group is already closed.
                raise self._stop
            outcome, cause = Outcome.TRUNCATED if self._truncated else Outcome.COMPLETED, ""
        except Stopped as stopped:
            outcome, cause = stopped.outcome, stopped.cause
        except EnvironmentFault as error:
            outcome, cause, trajectory.failure = Outcome.ENV_FAILED, str(error), error.kind
            fault = cause
        except EngineFault as error:
            outcome, cause, trajectory.failure = Outcome.ENGINE_FAILED, str(error), error.kind
        except RewardFault as error:
            outcome, cause, trajectory.failure = Outcome.REWARD_FAILED, str(error), error.kind
        finally:
            self.abandons = self._in_step and fault is None
            if self.abandons:
                services.environments.abandon(self.slot, trajectory, self._wait.deadline)
                self._in_step = False  # the environment is busy until it answers
            self._arrived()
            self._leave_environment(fault)
            services.scoring.forget(trajectory)
            trajectory.outcome = outcome
            services.owner.trajectory_ended(self, outcome, cause)
            trajectory.last_observation = EMPTY
            trajectory.transcript = b""

    def _reset(self) -> "asyncio.Future[Observed]":
        answer = self._services.environments.reset(self.slot, self.trajectory)
        return self._expect_environment(answer, "reset", self._settings.reset_deadline_s)

    def _step(self) -> "asyncio.Future[Observed]":
        action, self._action = self._action, None
        if action is None:
            raise InvariantBroken(f"{self} acts before anything was sampled")
        answer = self._services.environments.step(self.slot, self.trajectory, action)
        return self._expect_environment(answer, "step", self._settings.step_deadline_s)

    def _expect_environment(
        self, future: "asyncio.Future[Observed]", what: str, seconds: float
    ) -> "asyncio.Future[Observed]":
        context = self._services.context
        self._in_step = True
        context.accounts.busy(POOL, +1, context.now())
        context.waits.open(self._wait, self, what, seconds, "it gets a fresh one")
        return self._expect(future, EnvironmentFault)

    def _take(self, observed: Observed) -> bool:
        """Take an observation; return whether the episode is over.

        The agent's own limits are enforced here and nowhere else: at a limit the episode ends as truncated. The
        observation after the last action of a completed episode is not part of the sequence, because nothing is sampled
        or valued after it; that of a truncated one is the state whose value a critic needs.
        """
        self._arrived()
        trajectory, settings = self.trajectory, self._settings
        if observed.turn:
            trajectory.turn_rewards.append(observed.reward)
        trajectory.transcript = observed.transcript
        if observed.done and not observed.truncated:
            trajectory.last_observation = observed.observation
            return True
        if observed.new_sequence:
            trajectory.open_sequence()
        sequence = trajectory.sequence
        sequence.append_context(observed.observation)
        at_limit = settings.limit_reached(trajectory.turns, sequence.length) is not None
        self._truncated = observed.done or at_limit
        if trajectory.states is not None and not self._truncated:
            trajectory.states.append(observed.state or self._seen(observed))
        return self._truncated

    def _seen(self, observed: Observed) -> bytes:
        """Bytes that identify the state. Simulated tokens have none, so every state is unique."""
        payload = observed.observation.payload
        return f"{self.trajectory.id}.{observed.turn}".encode() if payload is None else payload

    def _ask_turn(self) -> "asyncio.Future[TurnResult]":
        trajectory, settings, services = self.trajectory, self._settings, self._services
        context = services.context
        room = settings.max_context - trajectory.sequence.length
        sampling = Sampling(
            max_tokens=min(settings.max_turn_tokens, room),
            temperature=settings.temperature,
            stop_tokens=services.stop_tokens,
            seed=turn_seed(self._seed_key, trajectory.turns),
        )
        deadline_s = context.config.deadlines.turn_s
        context.waits.open(self._wait, self, "a turn by an engine", deadline_s, "it ends as engine_failed")
        return self._expect(services.proxy.generate(trajectory, sampling, services.owner), EngineFault)

    def _take_turn(self, result: TurnResult) -> None:
        self._arrived()
        trajectory, context = self.trajectory, self._services.context
        generated = result.generated
        self._action = generated.tokens
        trajectory.sequence.append_sampled(generated)
        trajectory.turns += 1
        trajectory.turn_tokens.append(generated.tokens.length)
        if generated.runs:
            if trajectory.first_version is None:
                trajectory.first_version = generated.runs[0].version
            trajectory.last_version = generated.runs[-1].version
        context.record(
            TurnEnded(
                context.now(),
                trajectory.id,
                trajectory.turns,
                result.engine,
                generated.tokens.length,
                result.prefilled,
                result.cached,
                result.recomputed,
                tuple([(run.version, run.length) for run in generated.runs]),
            )
        )

    async def _at_barrier(self, barrier: BarrierGate) -> None:
        future = barrier.arrive(self.trajectory.id)
        if future is not None:
            await barrier.wait(self._expect(future, EngineFault), str(self))
            self._arrived()

    async def _reward(self, truncated: bool) -> None:
        trajectory = self.trajectory
        trajectory.truncated = truncated
        self._count_reward(+1)
        try:
            if self._reward_gate is not None:
                gate = self._expect(self._reward_gate.arrive(trajectory.id), RewardFault)
                await self._reward_gate.wait(gate, str(self))
                self._arrived()
            await self._expect(self._services.scoring.score(trajectory), RewardFault)
            if self._services.scoring.by_group(trajectory.task):
                if self._stop is not None:
                    raise self._stop  # in the same pass of the loop; its group must not count on it
                # No deadline of its own: those of the members that it waits for end this wait.
                await self._expect(self._services.owner.episode_finished(trajectory), RewardFault)
        finally:
            self._count_reward(-1)

    def _count_reward(self, change: int) -> None:
        accounts = self._services.context.accounts
        if self.trajectory.purpose is Purpose.TRAIN:
            accounts.awaiting_reward += change
            accounts.changed(self._services.context.now())

    def _expect(self, future: "asyncio.Future[T]", fault: type[RollartError]) -> "asyncio.Future[T]":
        """Register the future that is awaited next, so that `stop` and the deadline (as `fault`) can end it."""
        self._pending = future
        self._fault = fault
        if self._stop is not None and not future.done():
            future.set_exception(self._stop)
        return future

    def _arrived(self) -> None:
        """Close the current wait; idempotent."""
        self._pending = None
        context = self._services.context
        context.waits.close(self._wait)
        if self._in_step:
            self._in_step = False
            context.accounts.busy(POOL, -1, context.now())

    def _expired(self, wait: Wait) -> None:
        if self._pending is not None:
            fail(self._pending, wait, self._fault)

    def _leave_environment(self, fault: str | None) -> None:
        """Free everything that the episode holds; idempotent."""
        if self._in_environment:
            self._in_environment = False
            self._services.proxy.end(self.trajectory)
            if not self.abandons:
                self._services.environments.close(self.slot, self.trajectory)
            if self._barrier is not None:
                self._barrier.leave(self.trajectory.id)
            self._services.owner.episode_over(self, fault)
