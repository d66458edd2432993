"""EnvManager: one episode of one agent in one environment.

    reset ─► observation ─► turn (LLMProxy) ─► action ─► step ─► … ─► episode over ─► slot free ─► reward ─► end

It yields exactly one trajectory with exactly one outcome. Everything that can go wrong is turned into that outcome at
one boundary, `run`; a stop from outside (stale, redundant, cancelled) is a value too.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from rollart.config.schema import TaskSettings
from rollart.control.context import Context
from rollart.control.environments import POOL, EnvironmentPool, Slot
from rollart.control.gates import BarrierGate, RewardGate
from rollart.control.proxy import LLMProxy, TurnResult
from rollart.control.rewards import RewardDispatch
from rollart.control.waits import fail
from rollart.policy.seeds import member_key, turn_seed
from rollart.policy.watch import Wait
from rollart.types.errors import EngineFault, EnvironmentFault, InvariantBroken, RewardFault, RollartError
from rollart.types.journal import TurnEnded
from rollart.types.messages import Observed, Sampling
from rollart.types.tokens import Segment
from rollart.types.trajectory import Outcome, Purpose, Trajectory
from rollart.types.versions import Version

T = TypeVar("T")


class Stopped(Exception):
    """The episode was stopped from outside."""

    def __init__(self, outcome: Outcome, cause: str) -> None:
        super().__init__(cause)
        self.outcome = outcome
        self.cause = cause


@dataclass(frozen=True, slots=True)
class Stage:
    """What all episodes of a run share."""

    context: Context
    proxy: LLMProxy
    environments: EnvironmentPool
    rewards: RewardDispatch
    barrier: BarrierGate | None
    reward_gate: RewardGate | None
    stop_tokens: tuple[int, ...]
    first_token: Callable[[Trajectory, Version], None]
    check_bound: Callable[[Trajectory], None]
    """Asked at every turn; raises `Stopped` where the trajectory may not go on."""
    episode_over: Callable[["EnvManager", str | None], None]
    """The environment is free again; with the fault of the environment, if it had one."""
    ended: Callable[["EnvManager", Outcome, str], None]


class EnvManager:
    """One episode; see the module.

    It waits for one thing at a time, thousands of times, and ten thousand of it wait at once. So it awaits the futures
    themselves, in one coroutine and with one `Wait` that is opened again and again: `_expect`, await, `_arrived`.
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
        "_settings",
        "_stage",
        "_stop",
        "_truncated",
        "_wait",
        "slot",
        "trajectory",
    )

    def __init__(self, stage: Stage, trajectory: Trajectory, slot: Slot, settings: TaskSettings) -> None:
        self.trajectory = trajectory
        self.slot = slot
        self._stage = stage
        self._settings = settings
        self._pending: asyncio.Future[Any] | None = None
        self._wait = Wait(self._expired)
        self._fault: type[RollartError] = EnvironmentFault
        self._stop: Stopped | None = None
        self._in_environment = True
        self._in_step = False
        self._action: Segment | None = None
        """What was sampled, until it is acted on."""
        self._truncated = False
        self._seed_key = member_key(stage.context.config.seed, trajectory.prompt.seed, trajectory.member)
        # Evaluation takes no part in what a mode does to a training batch.
        training = trajectory.purpose is Purpose.TRAIN
        self._barrier = stage.barrier if training else None
        self._reward_gate = stage.reward_gate if training else None

    def __str__(self) -> str:
        """Who waits: the agent or, while it acts, its environment."""
        name = f"trajectory {self.trajectory.id}"
        return f"{self.slot.name} for {name}" if self._in_step else name

    def stop(self, outcome: Outcome, cause: str) -> None:
        """End the episode with this outcome at once, wherever it is. The first stop counts."""
        if self._stop is None:
            self._stop = Stopped(outcome, cause)
            if self._pending is not None and not self._pending.done():
                self._pending.set_exception(self._stop)

    async def run(self) -> None:
        """From reset to the one outcome: play until the environment or a limit of the agent's own ends it, then reward.

        All of it in one coroutine, because every turn wakes it twice, through whatever coroutines await each other.
        No answer stays in a variable while it waits for the next one: ten thousand of them would be cold memory.
        """
        trajectory, settings, stage, barrier = self.trajectory, self._settings, self._stage, self._barrier
        outcome, cause = Outcome.CANCELLED, "the run ended"
        fault: str | None = None
        try:
            if barrier is not None:
                barrier.join(trajectory.id)
            over = self._take(await self._reset())
            while not over:
                if trajectory.sequence.length >= settings.max_context or trajectory.turns >= settings.max_turns:
                    self._truncated = True
                    break
                if barrier is not None:
                    await self._at_barrier(barrier)
                stage.check_bound(trajectory)
                self._take_turn(await self._ask_turn())
                if barrier is not None:
                    await self._at_barrier(barrier)
                over = self._take(await self._step())
            else:
                stage.check_bound(trajectory)
            self._leave_environment(None)
            await self._reward(self._truncated)
            if self._stop is not None:
                # Its reward came in the same moment, but too late: its group is closed.
                raise self._stop
            outcome, cause = Outcome.TRUNCATED if self._truncated else Outcome.COMPLETED, ""
        except Stopped as stopped:
            outcome, cause = stopped.outcome, stopped.cause
        except EnvironmentFault as error:
            outcome, cause = Outcome.ENV_FAILED, str(error)
            fault = cause
        except EngineFault as error:
            outcome, cause = Outcome.ENGINE_FAILED, str(error)
        except RewardFault as error:
            outcome, cause = Outcome.REWARD_FAILED, str(error)
        finally:
            self._arrived()
            self._leave_environment(fault)
            stage.rewards.forget(trajectory)
            trajectory.outcome = outcome
            stage.ended(self, outcome, cause)

    def _reset(self) -> "asyncio.Future[Observed]":
        answer = self._stage.environments.reset(self.slot, self.trajectory)
        return self._expect_environment(answer, "reset", self._settings.reset_deadline_s)

    def _step(self) -> "asyncio.Future[Observed]":
        action, self._action = self._action, None
        if action is None:
            raise InvariantBroken(f"{self} acts before anything was sampled")
        answer = self._stage.environments.step(self.slot, self.trajectory, action)
        return self._expect_environment(answer, "step", self._settings.step_deadline_s)

    def _expect_environment(
        self, future: "asyncio.Future[Observed]", what: str, seconds: float
    ) -> "asyncio.Future[Observed]":
        context = self._stage.context
        self._in_step = True
        context.accounts.busy(POOL, +1, context.now())
        context.waits.open(self._wait, self, what, seconds, "it gets a fresh one")
        return self._expect(future, EnvironmentFault)

    def _take(self, observed: Observed) -> bool:
        """What the environment showed; gives whether that was the end."""
        self._arrived()
        trajectory = self.trajectory
        if observed.new_sequence:
            trajectory.open_sequence()
        trajectory.sequence.append_context(observed.observation)
        if observed.turn:
            trajectory.turn_rewards.append(observed.reward)
        if observed.done:
            trajectory.artifact = observed.artifact
            self._truncated = observed.truncated
        elif trajectory.states is not None:
            trajectory.states.append(observed.state or self._seen(observed))
        return observed.done

    def _seen(self, observed: Observed) -> bytes:
        """What makes its state. Simulated tokens show nothing: then it is a state that nobody else comes to."""
        payload = observed.observation.payload
        return f"{self.trajectory.id}.{observed.turn}".encode() if payload is None else payload

    def _ask_turn(self) -> "asyncio.Future[TurnResult]":
        trajectory, settings, stage = self.trajectory, self._settings, self._stage
        context = stage.context
        room = settings.max_context - trajectory.sequence.length
        sampling = Sampling(
            max_tokens=min(settings.max_turn_tokens, room),
            temperature=settings.temperature,
            stop_tokens=stage.stop_tokens,
            seed=turn_seed(self._seed_key, trajectory.turns),
        )
        deadline_s = context.config.deadlines.turn_s
        context.waits.open(self._wait, self, "a turn by an engine", deadline_s, "it ends as engine_failed")
        return self._expect(stage.proxy.generate(trajectory, sampling), EngineFault)

    def _take_turn(self, result: TurnResult) -> None:
        self._arrived()
        trajectory, context = self.trajectory, self._stage.context
        generated = result.generated
        self._action = generated.tokens
        trajectory.sequence.append_sampled(generated)
        trajectory.turns += 1
        trajectory.turn_tokens.append(generated.tokens.length)
        if generated.runs:
            if trajectory.first_version is None:
                trajectory.first_version = generated.runs[0].version
                self._stage.first_token(trajectory, trajectory.first_version)
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
            trajectory.reward = await self._expect(self._stage.rewards.score(trajectory), RewardFault)
        finally:
            self._count_reward(-1)

    def _count_reward(self, change: int) -> None:
        accounts = self._stage.context.accounts
        if self.trajectory.purpose is Purpose.TRAIN:
            accounts.awaiting_reward += change
            accounts.changed(self._stage.context.now())

    def _expect(self, future: "asyncio.Future[T]", fault: type[RollartError]) -> "asyncio.Future[T]":
        """The future is awaited next: `stop` reaches it, and so does the deadline, as `fault`."""
        self._pending = future
        self._fault = fault
        if self._stop is not None and not future.done():
            future.set_exception(self._stop)
        return future

    def _arrived(self) -> None:
        """What was expected came, as a result or a fault; asking twice is fine."""
        self._pending = None
        context = self._stage.context
        context.waits.close(self._wait)
        if self._in_step:
            self._in_step = False
            context.accounts.busy(POOL, -1, context.now())

    def _expired(self, wait: Wait) -> None:
        if self._pending is not None:
            fail(self._pending, wait, self._fault)

    def _leave_environment(self, fault: str | None) -> None:
        """Free everything that the episode holds; once."""
        if self._in_environment:
            self._in_environment = False
            self._stage.proxy.end(self.trajectory)
            self._stage.environments.close(self.slot, self.trajectory)
            if self._barrier is not None:
                self._barrier.leave(self.trajectory.id)
            self._stage.episode_over(self, fault)
