"""The pipeline: the trainer loop, and everything put together.

    for every step
        (1) get_batch       wait for a whole batch, claim it durably
        (2)–(5) sync        suspend, update, resume; KV of what is in flight is recomputed
        (6) train           beside rollout where the mode overlaps, else before rollout goes on

The five modes differ in `overlap` and in what the policies make of their settings; there is one loop.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollart.config.schema import RunConfig
from rollart.control.buffer import Batch, SampleBuffer
from rollart.control.context import Context
from rollart.control.environments import EnvironmentPool
from rollart.control.evaluation import Evaluation
from rollart.control.fleet import Fleet, WorkerSpec
from rollart.control.proxy import LLMProxy
from rollart.control.rewards import RewardDispatch
from rollart.control.rollout import Accept, RolloutScheduler, accept_all
from rollart.control.stalls import StallWatch
from rollart.control.trainer import POOL as TRAINER_POOL
from rollart.control.trainer import TrainerClient
from rollart.control.weights import WeightSync
from rollart.policy.routing import Router, TaskAffinity
from rollart.policy.staleness import StalenessBound
from rollart.ports.prompts import PromptSource
from rollart.ports.runtime import Runtime
from rollart.ports.sink import EventSink
from rollart.types.ids import ClaimId
from rollart.types.journal import ClaimReturned, EpochStarted, RunEnded, RunStarted, StepTrained
from rollart.types.versions import Version


@dataclass(frozen=True, slots=True)
class Parts:
    """The world that a run is connected to."""

    runtime: Runtime
    sink: EventSink
    workers: Sequence[WorkerSpec]
    prompts: Mapping[str, PromptSource]
    eval_prompts: Mapping[str, PromptSource]
    stop_tokens: tuple[int, ...] = ()
    accept: Accept = accept_all


async def run_pipeline(config: RunConfig, parts: Parts) -> None:
    """Run all steps of `config`, or raise what stopped them. The journal ends with `RunEnded` either way."""
    context = Context(config, parts.sink)
    pipeline = Pipeline(context, parts)
    reason = "interrupted"
    try:
        await context.nursery.run(pipeline.run())
        reason = ""
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise
    finally:
        await pipeline.close(reason)


class Pipeline:
    """The trainer loop; see the module."""

    def __init__(self, context: Context, parts: Parts) -> None:
        self._context = context
        config = context.config
        self._fleet = Fleet(context, parts.runtime, parts.workers)
        self._trainer = TrainerClient(context, self._fleet)
        self._proxy = LLMProxy(context, self._fleet, Router(_affinity(context)))
        self._weights = WeightSync(context, self._fleet, self._proxy)
        self._evaluation = Evaluation(context, parts.eval_prompts)
        bound = StalenessBound(config.alpha, context.mode.check_every_turn)
        self._buffer = SampleBuffer(context, bound, self._served)
        self._rollout = RolloutScheduler(
            context,
            proxy=self._proxy,
            environments=EnvironmentPool(context, self._fleet),
            rewards=RewardDispatch(context, self._fleet),
            buffer=self._buffer,
            bound=bound,
            served=self._served,
            prompts=parts.prompts,
            evaluation=self._evaluation,
            accept=parts.accept,
            stop_tokens=parts.stop_tokens,
        )
        self._stalls = StallWatch(context)
        self._weights.synced = lambda _version: self._rollout.version_changed()
        self._epoch = 0
        self._steps_done = 0

    def _served(self) -> Version:
        return self._weights.served

    async def run(self) -> None:
        """All steps; nothing new is started once this is over, however it ended."""
        try:
            await self._run()
        finally:
            self._rollout.halt()
            self._stalls.stop()

    async def _run(self) -> None:
        context, config = self._context, self._context.config
        context.record(
            RunStarted(
                context.now(),
                config.name,
                config.mode.value,
                config.alpha,
                config.seed,
                config.groups_per_batch(),
                config.batch.group_size,
            )
        )
        self._stalls.start()
        self._fleet.start()
        await self._trainer.joined()
        # The epoch is durable before anything is published under it: that is what fences an older trainer.
        context.record(EpochStarted(context.now(), self._epoch, 0))
        await context.sink.flush()
        self._weights.published(await self._trainer.publish(Version(self._epoch, 0)))
        await self._weights.first_version()
        self._rollout.start()
        self._open_evaluation(0)
        await self._train_all()
        await self._evaluation.finished()
        self._rollout.stop("the run ended")
        await self._rollout.drained()

    async def _train_all(self) -> None:
        config, overlap = self._context.config, self._context.mode.overlap
        training: asyncio.Task[None] | None = None
        for step in range(config.steps):
            if training is not None:
                await training
            batch = await self._claim(step)
            if overlap:
                await self._sync(step)
                training = self._context.nursery.start(self._train(batch, step), f"train-{step}")
            else:
                await self._train(batch, step)
                await self._sync(step + 1)
        if training is not None:
            await training
            await self._sync(config.steps)

    async def _claim(self, step: int) -> Batch:
        accounts, now = self._context.accounts, self._context.now
        accounts.idle_for(TRAINER_POOL, "rollout", now())
        batch = await self._buffer.get_batch(ClaimId(step), Version(self._epoch, step))
        accounts.idle_for(TRAINER_POOL, "weight_sync", now())
        return batch

    async def _sync(self, step: int) -> None:
        """The engines take the weights of `step`; where rollout drains, after the last trajectory in flight."""
        accounts = self._context.accounts
        if not self._context.mode.interrupt:
            await self._evaluation.finished()
        accounts.idle_for(TRAINER_POOL, "weight_sync", self._context.now())
        await self._weights.adopt_newest()
        every = self._context.config.eval_every
        if step and every and step % every == 0:
            self._open_evaluation(step)

    def _open_evaluation(self, step: int) -> None:
        if self._context.config.eval_every:
            self._evaluation.open(step)

    async def _train(self, batch: Batch, step: int) -> None:
        """One optimiser step on the batch, then the version goes to the store and engines begin to stage it."""
        context = self._context
        started = context.now()
        context.accounts.training = True
        context.accounts.changed(started)
        trained = await self._trainer.train(batch.claim, Version(self._epoch, step + 1), batch.samples)
        now = context.now()
        context.record(StepTrained(now, batch.claim, trained.version, now - started, trained.metrics))
        self._rollout.trained(self._buffer.trained(batch.claim))
        self._steps_done = step + 1
        for pool_time in context.accounts.close_period(now):
            context.record(pool_time)
        self._weights.published(await self._trainer.publish(trained.version))
        context.accounts.training = False
        context.accounts.changed(context.now())

    async def close(self, reason: str) -> None:
        """Everything ends, and the journal says why."""
        context = self._context
        for claim in self._buffer.claims():
            context.record(ClaimReturned(context.now(), claim, reason))
            self._buffer.returned(claim)
        self._rollout.stop(reason or "the run ended")
        for pool_time in context.accounts.close_period(context.now()):
            context.record(pool_time)
        context.record(RunEnded(context.now(), self._steps_done, reason))
        await self._fleet.close()
        await context.sink.close()


def _affinity(context: Context) -> dict[str, TaskAffinity]:
    config = context.config
    if not context.mode.affinity:
        # Without affinity a task may still not run where it cannot: the classes are the same, the preference is not.
        return {
            task: TaskAffinity(None, tuple(filter(None, (settings.hardware, *config.fallback_of(task)))))
            for task, settings in config.tasks.items()
        }
    return {task: TaskAffinity(settings.hardware, config.fallback_of(task)) for task, settings in config.tasks.items()}
