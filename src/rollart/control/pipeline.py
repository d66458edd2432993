"""The pipeline: one training run, and the whole loop on one page.

                 admission                                                  get_batch
    PromptSource ────────► RolloutScheduler ────► Episode × N ────► SampleBuffer ────► Pipeline: credit, train
                              ▲   ▲ slot_freed,      │    ▲ tokens                         │
                              │   │ group_dropped    ▼    │                                ▼
                              │   └──────────────  LLMProxy ◄──► engines ◄── store ◄─── trainer
                              │                                     ▲                      │
                              └── version_changed ◄── WeightSync ───┘ ◄─── published ──────┘

One step, with the paper's numbers:

    (1) claim       `SampleBuffer.get_batch` waits for ready groups in the configured shares; the claim is durable
                    before the trainer sees the batch
    (2) suspend     no new turns; those in flight are kept
    (3) update      engines commit the newest version, which they staged while rollout went on
    (4) resume      turns go out again
    (5) recompute   engines recompute the KV of what is in flight
    (6) train       credit the batch, make one optimiser step, publish the version: beside the rollout of the next
                    batch where the mode overlaps, else before rollout goes on

What each part waits for:

    the trainer     for a whole batch, in (1): the only wait of this loop for rollout
    rollout         for admission: a group starts only while it can still be claimed within the staleness bound α.
                    This is the back-pressure: a slow trainer stops new groups, so the buffer holds O(α) batches
    an episode      for its own environment, its own turns and its own reward, and for nothing else
    engines         for nothing but (2) to (4); staging a version never stops generation
    a version       trained ─► published to the store ─► staged and verified by every engine ─► committed ─► served:
                    from then on tokens carry it and staleness is measured against it; what is past the bound ends,
                    or is masked

The five modes are settings of the same policies: in this module `overlap` decides where (6) runs and `interrupt`
whether (2) drains rollout first. A lost trainer takes the loop back to its checkpoint under a new epoch
(`_enter_epoch`): whatever was sampled or trained beyond it is void, and its prompts are queued again.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rollart.config.schema import RunConfig
from rollart.control.affinity import AutomaticAffinity, affinity_rules
from rollart.control.buffer import Batch
from rollart.control.context import Context
from rollart.control.credit import samples
from rollart.control.elasticity import ElasticEngines, elastic_rules
from rollart.control.fleet import Fleet, WorkerSpec
from rollart.control.groups import group_rules
from rollart.control.proxy import LLMProxy
from rollart.control.resume import cancel_in_flight, end_cancelled_groups
from rollart.control.rollout import OnTrajectoryEnd, RolloutScheduler, ignore_trajectory
from rollart.control.stalls import StallWatch
from rollart.control.trainer import POOL as TRAINER_POOL
from rollart.control.trainer import TrainerClient
from rollart.control.weights import WeightSync
from rollart.policy.liveness import step_bound_s
from rollart.policy.rewards import RewardPlans, listed
from rollart.policy.routing import Router, TaskAffinity
from rollart.policy.sync import SyncBook
from rollart.ports.advantage import Estimator
from rollart.ports.prompts import PromptSource
from rollart.ports.runtime import Runtime
from rollart.ports.sink import EventSink
from rollart.types.errors import CallbackFailed, InvariantBroken, RollartError, TrainerLost, TrainingFailed
from rollart.types.failures import StopReason
from rollart.types.journal import (
    CheckpointFailed,
    CheckpointSaved,
    ClaimReturned,
    EpochStarted,
    PoolTime,
    RolledBack,
    RunEnded,
    RunResumed,
    RunStarted,
    Snapshot,
    StepTrained,
    TimeUse,
)
from rollart.types.snapshot import RunState
from rollart.types.versions import Version

MAX_FAILED_SAVES = 3

OnStep = Callable[[int], "asyncio.Future[str | None]"]
"""Called with the number of a step that was trained; the answer is a reason to end the run after it, or None."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Collaborators of the control plane: runtime, journal, workers, prompts, rewards, hooks."""

    runtime: Runtime
    sink: EventSink
    workers: Sequence[WorkerSpec]
    prompts: Mapping[str, PromptSource]
    eval_prompts: Mapping[str, PromptSource]
    rewards: RewardPlans
    advantage: Estimator
    stop_tokens: tuple[int, ...] = ()
    on_trajectory_end: OnTrajectoryEnd = ignore_trajectory
    on_step: OnStep | None = None


async def run_pipeline(config: RunConfig, parts: Parts, state: RunState | None = None) -> None:
    """Run all steps of `config`, or raise what stopped them. The journal ends with `RunEnded` either way.

    `state` is that of an earlier controller of the same run (`policy.lineage.replay` of its journal): the run goes on
    from the trainer's checkpoint, and no prompt is skipped or trained twice.
    """
    context = Context(config, parts.sink, state)
    pipeline = Pipeline(context, parts, resumed=state is not None)
    stop, reason = StopReason.INTERRUPTED, "interrupted"
    try:
        await context.nursery.run(pipeline.run())
        stop, reason = StopReason.DONE, pipeline.stopped_for
    except Exception as error:
        stop = error.stop_reason if isinstance(error, RollartError) else StopReason.FAILED
        reason = f"{type(error).__name__}: {error}"
        raise
    finally:
        await pipeline.close(stop, reason)


class Pipeline:
    """The trainer loop; see the module."""

    def __init__(self, context: Context, parts: Parts, *, resumed: bool) -> None:
        self._context = context
        self._resumed = resumed
        self._advantage, self._on_step = parts.advantage, parts.on_step
        self._last_step = context.config.steps
        self.stopped_for = ""
        """Why the run ended before its last step, if the callback asked for it."""
        self._rewards = listed(parts.rewards)
        self._fleet = Fleet(context, parts.runtime, parts.workers)
        self._elastic_rules = elastic_rules(context.config)
        self._elastic = (
            None if self._elastic_rules is None else ElasticEngines(context, self._fleet, self._elastic_rules)
        )
        self._trainer = TrainerClient(context, self._fleet)
        router, self._rules = Router(_affinity(context.config)), affinity_rules(context.config)
        self._affinity = None if self._rules is None else AutomaticAffinity(context, self._rules)
        self._proxy = LLMProxy(context, self._fleet, router, self._affinity)
        versions = SyncBook(rolling=context.config.rolling_update)
        self._rollout = RolloutScheduler(
            context,
            fleet=self._fleet,
            proxy=self._proxy,
            served=versions.version,
            prompts=parts.prompts,
            eval_prompts=parts.eval_prompts,
            rewards=parts.rewards,
            on_trajectory_end=parts.on_trajectory_end,
            stop_tokens=parts.stop_tokens,
        )
        self._buffer = self._rollout.buffer
        self._evaluation = self._rollout.evaluation
        self._weights = WeightSync(context, self._fleet, self._proxy, versions, observers=[self._rollout])
        self._stalls = StallWatch(context)
        self._saves_failed = 0

    async def run(self) -> None:
        """Run all steps. Nothing starts after this returns or raises."""
        try:
            await self._run()
        finally:
            self._rollout.halt()
            self._stalls.stop()
            if self._affinity is not None:
                self._affinity.stop()
            if self._elastic is not None:
                self._elastic.stop()

    async def _run(self) -> None:
        context, config = self._context, self._context.config
        if self._resumed:
            context.record(
                RunResumed(
                    context.now(),
                    config.mode.value,
                    config.alpha,
                    self._step_bound_s(),
                    group_rules(config),
                    self._rules,
                    self._rewards,
                    self._elastic_rules,
                )
            )
            cancel_in_flight(context)
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
                    self._step_bound_s(),
                    group_rules(config),
                    self._rules,
                    self._rewards,
                    self._elastic_rules,
                )
            )
        self._stalls.start()
        if self._affinity is not None:
            self._affinity.start(self._proxy)
        if self._elastic is not None:
            self._elastic.start(self._proxy)
        self._fleet.start()
        step = await self._start_epoch()
        self._open_evaluation(step)
        self._evaluation.use_all_environments()  # the baseline is measured before the first update
        await self._train_all(step)
        await self._evaluation.finished()
        self._rollout.stop("the run ended")
        await self._rollout.drained()

    def _step_bound_s(self) -> float:
        config = self._context.config
        return step_bound_s(config) + (0.0 if self._on_step is None else config.deadlines.on_step_s)

    async def _start_epoch(self) -> int:
        """Enter a new epoch; retry if the trainer is lost meanwhile."""
        while True:
            try:
                return await self._enter_epoch()
            except TrainerLost:
                continue

    async def _enter_epoch(self) -> int:
        """Continue the lineage from the checkpoint of the trainer that joined, under a new epoch.

        Nothing is sampled until its version is in service, so no trajectory gets tokens of a voided version.
        """
        context, lineage = self._context, self._context.lineage
        self._rollout.halt()
        self._proxy.suspend()
        restored = await self._trainer.joined()
        step = 0 if restored is None else restored.step
        self._settle_claims(step)
        # Durable before anything is published under the epoch: this is what fences an older trainer.
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
        """Claims that the checkpoint contains were trained, reported or not; all others are returned."""
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
            end_cancelled_groups(context)
        if step > context.lineage.step:
            raise InvariantBroken(
                f"the trainer's checkpoint holds step {step}, the journal knows of {context.lineage.step}: "
                "they belong to different runs, or a claim was not durable. Use the run folder of that checkpoint."
            )

    async def _train_all(self, step: int) -> None:
        """Run all steps from `step` on. A lost trainer takes the loop back to its checkpoint."""
        training: asyncio.Task[TrainerLost | None] | None = None
        while True:
            try:
                if training is not None:
                    lost, training = await training, None
                    if lost is not None:
                        raise lost
                if step == self._last_step:
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
        accounts.idle_for(TRAINER_POOL, TimeUse.ROLLOUT, now())
        batch = await self._buffer.get_batch(Version(self._context.lineage.epoch, step))
        accounts.idle_for(TRAINER_POOL, TimeUse.WEIGHT_SYNC, now())
        return batch

    async def _sync(self, step: int) -> None:
        """Engines take the weights of `step`; where the mode drains, after the last trajectory in flight."""
        accounts = self._context.accounts
        if not self._context.mode.interrupt:
            await self._evaluation.finished()
        accounts.idle_for(TRAINER_POOL, TimeUse.WEIGHT_SYNC, self._context.now())
        await self._weights.adopt_newest()
        every = self._context.config.eval_every
        if step and every and step % every == 0:
            if step == self._last_step:
                # The last round must not be skipped, so it waits for the one before.
                await self._evaluation.finished()
            self._open_evaluation(step)

    def _open_evaluation(self, step: int) -> None:
        if self._context.config.eval_every:
            self._evaluation.open(step)

    async def _train_beside(self, batch: Batch, step: int) -> TrainerLost | None:
        """Train while rollout goes on. A lost trainer is returned as a value, for the loop to handle."""
        try:
            await self._train(batch, step)
        except TrainerLost as lost:
            return lost
        return None

    async def _train(self, batch: Batch, step: int) -> None:
        """Credit and train the batch, then publish the version; engines begin to stage it."""
        context = self._context
        started = context.now()
        context.accounts.training = True
        context.accounts.changed(started)
        try:
            version = Version(context.lineage.epoch, step + 1)
            credited = samples(self._advantage, batch.groups)
            trained = await self._trainer.train(batch.claim, version, credited)
            now = context.now()
            context.record(StepTrained(now, batch.claim, version, now - started, trained.metrics))
            used = context.accounts.close_period(now)
            for event in used:  # right after the step that it belongs to
                context.record(event)
            stop = None if self._on_step is None else self._on_step(version.step)
            if self._elastic is not None:
                self._elastic.step_trained([event for event in used if isinstance(event, PoolTime)])
            self._rollout.trained(self._buffer.trained(batch.claim))
            if self._affinity is not None:
                self._affinity.step_trained()
            self._weights.published(await self._trainer.publish(version))
            if stop is not None:
                await self._ask(stop, version.step)
            await self._save(version)
            if self._trainer.leaves:
                self._trainer.leave()
        finally:
            context.accounts.training = False
            context.accounts.changed(context.now())

    async def _ask(self, answer: "asyncio.Future[str | None]", step: int) -> None:
        """Wait for the callback of a step, which may make it the last one."""
        limit_s = self._context.config.deadlines.on_step_s
        reason = await self._context.waits.wait(
            answer, "on_step", f"the callback of step {step}", limit_s, "the run stops", CallbackFailed
        )
        if reason is not None:
            self._last_step, self.stopped_for = step, f"stopped by on_step after step {step}: {reason}"

    async def _save(self, version: Version) -> None:
        """Save a checkpoint if one is due: every `checkpoint_every` steps, before the trainer leaves its node, and
        always after the last one.

        The last one is retried until it is saved or the run fails, because no later one makes up for it.
        """
        config = self._context.config
        if version.step == self._last_step:
            while not await self._saved(version):
                pass
        elif self._trainer.leaves or (config.checkpoint_every and version.step % config.checkpoint_every == 0):
            await self._saved(version)

    async def _saved(self, version: Version) -> bool:
        """Save a checkpoint and a snapshot of the run; raise after too many failures in a row."""
        context = self._context
        reason = await self._trainer.save(version)
        if reason is None:
            self._saves_failed = 0
            context.record(CheckpointSaved(context.now(), version))
            context.record(Snapshot(context.now(), context.lineage.state()))
            return True
        self._saves_failed += 1
        context.record(CheckpointFailed(context.now(), version, reason))
        if self._saves_failed >= MAX_FAILED_SAVES:
            raise TrainingFailed(f"a checkpoint could not be saved {MAX_FAILED_SAVES} times in a row: {reason}")
        return False

    async def close(self, stop: StopReason, reason: str) -> None:
        """End everything; the journal records why."""
        context = self._context
        for claim in self._buffer.claims():
            context.record(ClaimReturned(context.now(), claim, reason))
            self._buffer.returned(claim)
        self._rollout.stop(reason or "the run ended")
        for used in context.accounts.close_period(context.now()):
            context.record(used)
        context.record(RunEnded(context.now(), context.lineage.step, reason, stop))
        await self._fleet.close()
        await context.sink.close()


def _affinity(config: RunConfig) -> dict[str, TaskAffinity]:
    affinity = {}
    for task in config.tasks:
        declared, others = config.declared_class(task), config.fallback_of(task)
        if declared is None or config.mode_settings.affinity:
            affinity[task] = TaskAffinity(declared, others)
        else:
            # Affinity off removes the preference, not the restriction to compatible classes.
            affinity[task] = TaskAffinity(None, (declared, *others))
    return affinity
