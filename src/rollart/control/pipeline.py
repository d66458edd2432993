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
from rollart.control.resume import bury, end_buried_groups
from rollart.control.rewards import RewardDispatch
from rollart.control.rollout import Accept, Ended, RolloutScheduler, accept_all, look_at_none
from rollart.control.stalls import StallWatch
from rollart.control.trainer import POOL as TRAINER_POOL
from rollart.control.trainer import TrainerClient
from rollart.control.weights import WeightSync
from rollart.policy.liveness import step_bound_s
from rollart.policy.routing import Router, TaskAffinity
from rollart.policy.staleness import StalenessBound
from rollart.ports.prompts import PromptSource
from rollart.ports.runtime import Runtime
from rollart.ports.sink import EventSink
from rollart.types.errors import InvariantBroken, TrainerLost, TrainingFailed
from rollart.types.journal import (
    CheckpointFailed,
    CheckpointSaved,
    ClaimReturned,
    EpochStarted,
    RolledBack,
    RunEnded,
    RunResumed,
    RunStarted,
    Snapshot,
    StepTrained,
)
from rollart.types.snapshot import RunState
from rollart.types.versions import Version

MAX_FAILED_SAVES = 3


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
    ended: Ended = look_at_none


async def run_pipeline(config: RunConfig, parts: Parts, state: RunState | None = None) -> None:
    """Run all steps of `config`, or raise what stopped them. The journal ends with `RunEnded` either way.

    `state` is that of an earlier controller of the same run (`policy.lineage.replay` of its journal): the run goes on
    from the trainer's checkpoint, and no prompt is skipped or trained twice.
    """
    context = Context(config, parts.sink, state)
    pipeline = Pipeline(context, parts, resumed=state is not None)
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

    def __init__(self, context: Context, parts: Parts, *, resumed: bool) -> None:
        self._context = context
        self._resumed = resumed
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
            ended=parts.ended,
            stop_tokens=parts.stop_tokens,
        )
        self._stalls = StallWatch(context)
        self._weights.synced = lambda _version: self._rollout.version_changed()
        self._saves_failed = 0

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
        if self._resumed:
            context.record(RunResumed(context.now(), config.mode.value, config.alpha, step_bound_s(config)))
            bury(context)
        else:
            context.record(
                RunStarted(
                    context.now(),
                    config.name,
                    config.mode.value,
                    config.alpha,
                    config.seed,
                    config.groups_per_batch(),
                    config.batch.group_size,
                    config.batch.extra_groups,
                    step_bound_s(config),
                )
            )
        self._stalls.start()
        self._fleet.start()
        step = await self._start_epoch()
        self._open_evaluation(step)
        self._evaluation.go_first()  # what is compared with later was not trained yet
        await self._train_all(step)
        await self._evaluation.finished()
        self._rollout.stop("the run ended")
        await self._rollout.drained()

    async def _start_epoch(self) -> int:
        """Go on from whatever checkpoint a trainer comes back with, however often it is lost on the way."""
        while True:
            try:
                return await self._enter_epoch()
            except TrainerLost:
                continue

    async def _enter_epoch(self) -> int:
        """A trainer is there, from whatever checkpoint: the lineage goes on from that step, under a new epoch.

        Until its version is in service nothing is sampled, so nothing gets tokens of a version that is void.
        """
        context, lineage = self._context, self._context.lineage
        self._rollout.halt()
        self._proxy.suspend()
        restored = await self._trainer.joined()
        step = 0 if restored is None else restored.step
        self._settle_claims(step)
        # The epoch is durable before anything is published under it: that is what fences an older trainer.
        context.record(EpochStarted(context.now(), lineage.epoch + 1, step))
        void = tuple(entry.group for entry in lineage.trained_after(step))
        if lineage.step != step:
            context.record(RolledBack(context.now(), lineage.epoch, step, void))
        self._rollout.roll_back(step)
        await context.sink.flush()
        self._weights.published(await self._trainer.publish(Version(lineage.epoch, step)))
        await self._weights.first_version()
        await self._weights.adopt_newest()
        self._proxy.resume()
        self._rollout.start()
        return step

    def _settle_claims(self, step: int) -> None:
        """A claim that the checkpoint holds was trained, whether or not we heard of it; any other is returned."""
        context = self._context
        for claim in context.lineage.state().claims:
            if claim.step < step:
                version = Version(context.lineage.epoch, claim.step + 1)
                context.record(StepTrained(context.now(), claim.claim, version, 0.0, {}))
                if claim.claim in self._buffer.claims():
                    self._rollout.trained(self._buffer.trained(claim.claim))
            else:
                context.record(ClaimReturned(context.now(), claim.claim, "the trainer was lost"))
                if claim.claim in self._buffer.claims():
                    self._buffer.returned(claim.claim)
        if self._resumed:
            self._resumed = False
            end_buried_groups(context)
        if step > context.lineage.step:
            raise InvariantBroken(
                f"the trainer's checkpoint holds step {step}, the journal knows of {context.lineage.step}: "
                "they are not of one run, or a claim was not durable. Give the run folder that they belong to."
            )

    async def _train_all(self, step: int) -> None:
        """Every step, from `step` on; a trainer that is lost takes us back to its checkpoint."""
        training: asyncio.Task[TrainerLost | None] | None = None
        while True:
            try:
                if training is not None:
                    lost, training = await training, None
                    if lost is not None:
                        raise lost
                if step == self._context.config.steps:
                    if self._context.mode.overlap:
                        await self._sync(step)
                    return
                batch = await self._claim(step)
                if self._context.mode.overlap:
                    await self._sync(step)
                    training = self._context.nursery.start(self._train_beside(batch, step), f"train-{step}")
                else:
                    await self._train(batch, step)
                    await self._sync(step + 1)
                step += 1
            except TrainerLost:
                step = await self._start_epoch()

    async def _claim(self, step: int) -> Batch:
        accounts, now = self._context.accounts, self._context.now
        accounts.idle_for(TRAINER_POOL, "rollout", now())
        batch = await self._buffer.get_batch(Version(self._context.lineage.epoch, step))
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
            if step == self._context.config.steps:
                # No later round makes up for the last one, so it waits for the one before instead of being skipped.
                await self._evaluation.finished()
            self._open_evaluation(step)

    def _open_evaluation(self, step: int) -> None:
        if self._context.config.eval_every:
            self._evaluation.open(step)

    async def _train_beside(self, batch: Batch, step: int) -> TrainerLost | None:
        """Train while rollout goes on. A lost trainer is a value, for the loop to act on."""
        try:
            await self._train(batch, step)
        except TrainerLost as lost:
            return lost
        return None

    async def _train(self, batch: Batch, step: int) -> None:
        """One optimiser step on the batch, then the version goes to the store and engines begin to stage it."""
        context = self._context
        started = context.now()
        context.accounts.training = True
        context.accounts.changed(started)
        try:
            version = Version(context.lineage.epoch, step + 1)
            trained = await self._trainer.train(batch.claim, version, batch.samples)
            now = context.now()
            context.record(StepTrained(now, batch.claim, version, now - started, trained.metrics))
            for pool_time in context.accounts.close_period(now):  # right after the step that it belongs to
                context.record(pool_time)
            self._rollout.trained(self._buffer.trained(batch.claim))
            self._weights.published(await self._trainer.publish(version))
            await self._save(version)
        finally:
            context.accounts.training = False
            context.accounts.changed(context.now())

    async def _save(self, version: Version) -> None:
        """Every few steps and at the end, a checkpoint; with it, the state of the run."""
        context, config = self._context, self._context.config
        every = config.checkpoint_every
        if not every or (version.step % every and version.step != config.steps):
            return
        reason = await self._trainer.save(version)
        if reason is None:
            self._saves_failed = 0
            context.record(CheckpointSaved(context.now(), version))
            context.record(Snapshot(context.now(), context.lineage.state()))
            return
        self._saves_failed += 1
        context.record(CheckpointFailed(context.now(), version, reason))
        if self._saves_failed >= MAX_FAILED_SAVES:
            raise TrainingFailed(f"{MAX_FAILED_SAVES} checkpoints in a row could not be saved: {reason}")

    async def close(self, reason: str) -> None:
        """Everything ends, and the journal says why."""
        context = self._context
        for claim in self._buffer.claims():
            context.record(ClaimReturned(context.now(), claim, reason))
            self._buffer.returned(claim)
        self._rollout.stop(reason or "the run ended")
        for pool_time in context.accounts.close_period(context.now()):
            context.record(pool_time)
        context.record(RunEnded(context.now(), context.lineage.step, reason))
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
