"""EnvManager: one episode of one agent in one environment.

    reset ─► observation ─► turn (LLMProxy) ─► action ─► step ─► … ─► episode over ─► slot free ─► reward ─► end

It yields exactly one trajectory with exactly one outcome. Everything that can go wrong is turned into that outcome at
one boundary, `run`; a stop from outside (stale, redundant, cancelled) is a value too.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from rollart.config.schema import TaskSettings
from rollart.control.context import Context
from rollart.control.environments import POOL, EnvironmentPool, Slot
from rollart.control.gates import BarrierGate, RewardGate
from rollart.control.proxy import LLMProxy, TurnResult
from rollart.control.rewards import RewardDispatch
from rollart.policy.seeds import sampling_seed
from rollart.types.errors import EngineFault, EnvironmentFault, RewardFault
from rollart.types.journal import TurnEnded
from rollart.types.messages import Observed, Sampling
from rollart.types.tokens import TokenSequence
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
    """One episode; see the module."""

    def __init__(self, stage: Stage, trajectory: Trajectory, slot: Slot, settings: TaskSettings) -> None:
        self.trajectory = trajectory
        self.slot = slot
        self._stage = stage
        self._settings = settings
        self._pending: asyncio.Future[Any] | None = None
        self._stop: Stopped | None = None
        self._in_environment = True
        self._name = f"trajectory {trajectory.id}"
        # Evaluation takes no part in what a mode does to a training batch.
        training = trajectory.purpose is Purpose.TRAIN
        self._barrier = stage.barrier if training else None
        self._reward_gate = stage.reward_gate if training else None

    def stop(self, outcome: Outcome, cause: str) -> None:
        """End the episode with this outcome at once, wherever it is. The first stop counts."""
        if self._stop is None:
            self._stop = Stopped(outcome, cause)
            if self._pending is not None and not self._pending.done():
                self._pending.set_exception(self._stop)

    async def run(self) -> None:
        """From reset to the one outcome."""
        outcome, cause = Outcome.CANCELLED, "the run ended"
        fault: str | None = None
        try:
            if self._barrier is not None:
                self._barrier.join(self.trajectory.id)
            truncated = await self._episode()
            self._leave_environment(None)
            await self._reward(truncated)
            if self._stop is not None:
                # Its reward came in the same moment, but too late: its group is closed.
                raise self._stop
            outcome, cause = Outcome.TRUNCATED if truncated else Outcome.COMPLETED, ""
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
            self._leave_environment(fault)
            self._stage.rewards.forget(self.trajectory)
            self.trajectory.outcome = outcome
            self._stage.ended(self, outcome, cause)

    async def _episode(self) -> bool:
        """Play until the environment or a limit of the agent's own ends it; True for the latter."""
        trajectory, settings, stage = self.trajectory, self._settings, self._stage
        observed = await self._environment(
            stage.environments.reset(self.slot, trajectory), "reset", settings.reset_deadline_s
        )
        self._take(observed)
        while not observed.done:
            if trajectory.sequence.length >= settings.max_context or trajectory.turns >= settings.max_turns:
                return True
            await self._at_barrier()
            stage.check_bound(trajectory)
            result = await self._turn()
            await self._at_barrier()
            observed = await self._environment(
                stage.environments.step(self.slot, trajectory, result.generated.tokens),
                "step",
                settings.step_deadline_s,
            )
            self._take(observed)
        stage.check_bound(trajectory)
        return observed.truncated

    async def _environment(self, future: "asyncio.Future[Observed]", what: str, seconds: float) -> Observed:
        accounts = self._stage.context.accounts
        accounts.busy(POOL, +1, self._stage.context.now())
        try:
            return await self._wait(
                future,
                self._stage.context.waits.wait(
                    future, self.slot.name, f"{what} of {self._name}", seconds, "it gets a fresh one", EnvironmentFault
                ),
            )
        finally:
            accounts.busy(POOL, -1, self._stage.context.now())

    def _take(self, observed: Observed) -> None:
        trajectory = self.trajectory
        if observed.new_sequence:
            trajectory.sequences.append(TokenSequence())
        trajectory.sequence.append_context(observed.observation)
        if observed.turn:
            trajectory.turn_rewards.append(observed.reward)
        if observed.done:
            trajectory.artifact = observed.artifact

    async def _turn(self) -> TurnResult:
        trajectory, settings, stage = self.trajectory, self._settings, self._stage
        context = stage.context
        room = settings.max_context - trajectory.sequence.length
        sampling = Sampling(
            max_tokens=min(settings.max_turn_tokens, room),
            temperature=settings.temperature,
            stop_tokens=stage.stop_tokens,
            seed=sampling_seed(context.config.seed, trajectory.prompt.seed, trajectory.member, trajectory.turns),
        )
        future = stage.proxy.generate(trajectory, sampling)
        result = await self._wait(
            future,
            context.waits.wait(
                future,
                self._name,
                f"turn {trajectory.turns} by an engine",
                context.config.deadlines.turn_s,
                "it ends as engine_failed",
                EngineFault,
            ),
        )
        generated = result.generated
        trajectory.sequence.append_sampled(generated)
        trajectory.turns += 1
        if generated.runs:
            if trajectory.first_version is None:
                trajectory.first_version = generated.runs[0].version
                stage.first_token(trajectory, trajectory.first_version)
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
                tuple((run.version, run.length) for run in generated.runs),
            )
        )
        return result

    async def _at_barrier(self) -> None:
        if self._barrier is not None:
            future = self._barrier.arrive(self.trajectory.id)
            if future is not None:
                await self._wait(future, self._barrier.wait(future, self._name))

    async def _reward(self, truncated: bool) -> None:
        trajectory = self.trajectory
        trajectory.truncated = truncated
        self._count_reward(+1)
        try:
            trajectory.reward = await self._ask_reward()
        finally:
            self._count_reward(-1)

    async def _ask_reward(self) -> float:
        trajectory = self.trajectory
        if self._reward_gate is not None:
            gate = self._reward_gate.arrive(trajectory.id)
            await self._wait(gate, self._reward_gate.wait(gate, self._name))
        answer = self._stage.rewards.score(trajectory)
        return await self._wait(answer, _result(answer))

    def _count_reward(self, change: int) -> None:
        accounts = self._stage.context.accounts
        if self.trajectory.purpose is Purpose.TRAIN:
            accounts.awaiting_reward += change
            accounts.changed(self._stage.context.now())

    async def _wait(self, future: "asyncio.Future[Any]", waiting: Coroutine[Any, Any, T]) -> T:
        """Wait so that `stop` reaches us."""
        self._pending = future
        if self._stop is not None and not future.done():
            future.set_exception(self._stop)
        try:
            return await waiting
        finally:
            self._pending = None

    def _leave_environment(self, fault: str | None) -> None:
        """Free everything that the episode holds; once."""
        if self._in_environment:
            self._in_environment = False
            self._stage.proxy.end(self.trajectory)
            self._stage.environments.close(self.slot, self.trajectory)
            if self._barrier is not None:
                self._barrier.leave(self.trajectory.id)
            self._stage.episode_over(self, fault)


async def _result(future: "asyncio.Future[T]") -> T:
    return await future
