"""Torch trainer: any causal language model of `transformers`, on packed rows without padding.

    Train ──► shares of the ranks ──► mini-batches, one optimiser step each, `epochs` times over
    a step ──► micro-batches ≤ token_budget ──► log-probabilities ──► loss, backward ──► clip, AdamW
               sequences with zero advantage are measured but skip the backward pass
    Publish ──► a copy of the weights ──► thread: buckets, digests, store           meanwhile the next Train may run
                each rank of its own rows, where the store takes them from several (`sharded_draft`)

Invariants, besides those of every trainer (`worker`):
- Loss and gradient are those of the whole mini-batch, however it is split and whichever prefixes are shared:
  normalisers are totals of the mini-batch, and gradients of micro-batches add up.
- The proximal policy has the weights before the first update on a claim. With one step per claim these are the weights
  of the forward pass, at no extra cost; with several steps, or with a critic, a separate pass precedes the first step
  (`proximal_pass`). `mismatch` compares it with the engines' log-probabilities for every claim.
- Mini-batches hold whole trajectories and are split deterministically. All steps of a claim share one learning rate;
  schedules count claims.
- A step with a non-finite loss or gradient is skipped: weights, optimiser and schedule are unchanged, the cause is
  logged, and `Trained` counts it in `skipped_now`. The version still advances, because the claim is spent and the run
  goes on: if all steps of a claim were skipped, the new version has the previous weights and can be published and
  saved. The `max_skipped`-th claim in a row without a step is `TrainerFailed`, which stops the run.
- Parameters are float32, whatever the layers compute in: with bfloat16 they are the optimiser's master weights and are
  what checkpoints hold; published weights are converted.
- Training resumes from a checkpoint as if it had never stopped, bit for bit in float32.
- Several ranks form one trainer: weights, versions, checkpoints and metrics are those of a single process, up to the
  order of summation. All ranks run the `…_everywhere` methods together, each on its own share of the batch (`ranks`,
  `types.rank_shares`), and exchange what they must agree on (`claims`, `rank_partition`, `sharding`).
"""

import logging
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import torch

from rollart.algo.loss import policy_loss
from rollart.algo.metrics import Metrics
from rollart.algo.packed import PackedBatch
from rollart.algo.surrogate import BadLoss, needs_every_sequence
from rollart.backends.models import build_model, keep_freed_memory
from rollart.backends.trainers import training_state
from rollart.backends.trainers.checkpoint import Checkpoint
from rollart.backends.trainers.child_ranks import ChildRanks
from rollart.backends.trainers.claims import Claim, Step, claim_of, steps_of
from rollart.backends.trainers.critic import Critic
from rollart.backends.trainers.lora import Adapter
from rollart.backends.trainers.packed_model import PackedModel
from rollart.backends.trainers.packing import Item, MicroBatch, Untrainable
from rollart.backends.trainers.proximal_pass import proximal_pass
from rollart.backends.trainers.publishing import Draft, Snapshot
from rollart.backends.trainers.rank_partition import Part, filler_batch
from rollart.backends.trainers.ranks import RankHandle, Ranks
from rollart.backends.trainers.sharded_draft import ShardedDraft
from rollart.backends.trainers.sharding import clip, of_each_rank, over_ranks, own_part, own_rows, shard, whole
from rollart.backends.trainers.worker import TrainerWorker, TrainerWorkerSettings
from rollart.config.algorithm import AlgorithmSettings, CorrectionKind, CriticSettings, PolicyLoss
from rollart.ports.algorithm import surrogate_of
from rollart.ports.weights import ShardedWeightStore
from rollart.ports.worker import Advance
from rollart.types.errors import RequestError
from rollart.types.messages import Train
from rollart.types.rank_shares import Share, split
from rollart.types.versions import Version
from rollart.types.weights import WeightKind

T = TypeVar("T")

logger = logging.getLogger(__name__)


class TorchTrainerSettings(TrainerWorkerSettings):
    """What the torch trainer is started with."""

    algorithm: AlgorithmSettings = AlgorithmSettings()
    rank_starter: Any = None
    """The `RankStarter` of its ranks; None = child processes."""


class Update(NamedTuple):
    """Result of one optimiser step."""

    metrics: dict[str, float]
    skipped_for: str
    """Reason why the step was skipped; empty if it was made."""
    micro_batches: int
    fed_tokens: int

    @property
    def finite(self) -> bool:
        return not self.skipped_for


class TorchTrainer(TrainerWorker):
    """A trainer worker; its factory path is `rollart.backends.trainers.torch_trainer:TorchTrainer`."""

    def __init__(
        self, settings: Mapping[str, Any], wake: Callable[[], None], *, rank: RankHandle | None = None
    ) -> None:
        """`rank` is set on ranks other than 0, which save nothing and execute the calls of rank 0."""
        own = self._settings = TorchTrainerSettings.model_validate(dict(settings))
        self._rank = 0 if rank is None else rank.info.rank
        self._ranks: Ranks | None = None
        if own.trainer.ranks > 1 and rank is None:
            store = own.store if isinstance(own.store, ShardedWeightStore) else None
            alike = own.model_copy(update={"store": store, "checkpoints": None, "rank_starter": None})
            starter = own.rank_starter or ChildRanks()
            self._ranks = Ranks(alike, own.trainer.ranks, own.trainer.device, wake, starter=starter)
        try:
            self._set_up(wake, rank)
        except BaseException:
            self._end_ranks()
            raise

    def _set_up(self, wake: Callable[[], None], rank: RankHandle | None) -> None:
        own = self._settings
        keep_freed_memory()
        self._surrogate = surrogate_of(own.algorithm.loss)
        self._packed = self._build()
        self._reference = self._build() if own.algorithm.loss.kl_weight else None
        """Frozen initial weights, not those of a checkpoint."""
        model = self._packed.model
        self._adapter = (
            None
            if own.trainer.lora is None
            else Adapter(
                model,
                own.trainer.lora,
                source=own.source,
                seed=own.seed,
            )
        )
        group = rank or self._ranks
        if group is not None:
            mesh = group.meet()
            for packed in (self._packed, self._reference):
                if packed is not None:
                    shard(packed.model, mesh, getattr(torch, own.trainer.dtype))
        dtype = getattr(torch, own.trainer.dtype)
        self._published_as = Snapshot(dtype, "meta" if self._rank else "cpu")
        self._own_rows_as = Snapshot(dtype, view=own_part)
        self._shards: ShardedDraft | None = None
        self._sending: threading.Thread | None = None
        self._steps = 0
        self._skipped_in_a_row = 0
        critic = own.algorithm.critic()
        self._critic = None if critic is None else self._build_critic(critic)
        optimizer = self._optimizer_of({name: each for name, each in model.named_parameters() if each.requires_grad})
        layout = None if self._adapter is None else self._adapter.layout()
        super().__init__(own, model, optimizer, layout=layout, wake=wake)

    def _build(self) -> PackedModel:
        own = self._settings
        return PackedModel(
            build_model(
                own.model,
                dtype="float32",
                device=own.trainer.device if own.trainer.ranks == 1 else "cpu",
                seed=own.seed,
            ),
            temperature=own.temperature,
            compute=getattr(torch, own.trainer.dtype),
            gradient_checkpointing=own.trainer.gradient_checkpointing,
        )

    def _optimizer_of(self, parameters: Mapping[str, torch.nn.Parameter]) -> torch.optim.Optimizer:
        own = self._settings.trainer
        return torch.optim.AdamW(
            list(parameters.values()), lr=own.learning_rate, weight_decay=own.weight_decay, betas=own.betas, fused=True
        )

    def _build_critic(self, settings: CriticSettings) -> Critic:
        own = self._settings
        return Critic(
            settings,
            int(self._packed.model.config.get_text_config().hidden_size),
            learning_rate=own.trainer.learning_rate,
            max_grad_norm=own.trainer.max_grad_norm,
            device=torch.device(own.trainer.device),
            ranks=own.trainer.ranks,
            rank=self._rank,
        )

    def _seat(self) -> tuple[int, int]:
        return self._settings.trainer.ranks, self._rank

    def advance(self, now: float) -> Advance:
        if self._ranks is not None:
            self._ranks.check()
        return super().advance(now)

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._end_ranks()

    def _end_ranks(self) -> None:
        if self._ranks is not None:
            self._ranks.close()

    def _together(self, work: Callable[..., T], *args: Any) -> T:
        """Call this method on all ranks; returns the local result."""
        return work(*args) if self._ranks is None else self._ranks.do(work, *args)

    # --- weights

    def _snapshot(self) -> Mapping[str, torch.Tensor]:
        return self._together(self._snapshot_everywhere, self._kind())

    def _snapshot_everywhere(self, kind: WeightKind) -> Mapping[str, torch.Tensor]:
        if self._adapter is None:
            return self._published_as.take(self._model.state_dict(keep_vars=True))
        factors = self._adapter.factors()
        if kind is WeightKind.ADAPTER:
            return self._adapter.adapter_version(factors)
        base = self._published_as.take(self._adapter.base())
        return base if self._rank else self._adapter.full_version(base, factors)

    def _draft(self, version: Version, parent: Version | None, kind: WeightKind) -> Draft:
        gathered = self._ranks is None or kind is WeightKind.ADAPTER
        if gathered or not isinstance(self._settings.store, ShardedWeightStore):
            return super()._draft(version, parent, kind)
        draft = self._together(self._shards_everywhere, version, parent, kind)
        draft.begin()
        self._together(self._send_everywhere)
        return draft

    def _shards_everywhere(self, version: Version, parent: Version | None, kind: WeightKind) -> ShardedDraft:
        if self._sending is not None:
            self._sending.join()  # it reads the copy
        self._shards = ShardedDraft(
            version,
            parent,
            kind,
            self._own_rows(),
            self._bucket_bytes,
            store=self._settings.store,
            rank=self._rank,
            ranks=self._settings.trainer.ranks,
        )
        return self._shards

    def _own_rows(self) -> Mapping[str, torch.Tensor]:
        """A copy of this rank's rows of all weights; tensors of which it has none are left out."""
        tensors = self._model.state_dict(keep_vars=True) if self._adapter is None else self._adapter.base()
        rows = {name: own_rows(tensor) for name, tensor in tensors.items()}
        own = {name: tensor for name, tensor in tensors.items() if rows[name]}
        copied = self._own_rows_as.take(own)
        return copied if self._adapter is None else self._adapter.full_shards(copied, self._adapter.factors(), rows)

    def _send_everywhere(self) -> None:
        """Begin to write the buckets of the other ranks; rank 0 writes its own with the publication."""
        if self._rank and self._shards is not None:
            self._sending = threading.Thread(target=self._shards.send, name="shards", daemon=True)
            self._sending.start()

    def _kind(self) -> WeightKind:
        lora = self._settings.trainer.lora
        if lora is None or lora.publish == "merged" or self._publisher.base is None:
            return WeightKind.FULL
        return WeightKind.ADAPTER

    def _weights_to_save(self) -> training_state.Tensors:
        return self._together(self._weights_everywhere)

    def _weights_everywhere(self) -> training_state.Tensors:
        return self._kept(super()._weights_to_save())

    def _moments_to_save(self) -> training_state.Tensors:
        return self._together(self._moments_everywhere)

    def _moments_everywhere(self) -> training_state.Tensors:
        return self._kept(super()._moments_to_save())

    def _kept(self, tensors: training_state.Tensors) -> training_state.Tensors:
        """Full tensors, gathered one at a time, on the CPU of rank 0."""
        kept = {}
        for name, tensor in tensors.items():
            gathered = whole(tensor)
            if not self._rank:
                kept[name] = gathered.cpu()
        return kept

    def _facts(self) -> dict[str, Any]:
        facts = super()._facts() | {"steps": self._steps, "skipped_in_a_row": self._skipped_in_a_row}
        return facts if self._adapter is None else facts | {"base": self._adapter.fingerprint}

    def _restore(self, checkpoint: Checkpoint) -> None:
        self._together(self._restore_everywhere, checkpoint)

    def _restore_everywhere(self, checkpoint: Checkpoint) -> None:
        own = None if self._adapter is None else self._adapter.fingerprint
        if own is not None and checkpoint.facts.get("base", own) != own:
            raise RequestError(
                f"checkpoint {checkpoint.folder} is an adapter on a different model; give the trainer the model (or "
                "config and seed) it was trained on, or another folder for checkpoints"
            )
        super()._restore(checkpoint)
        self._steps = int(checkpoint.facts["steps"])
        self._skipped_in_a_row = int(checkpoint.facts["skipped_in_a_row"])
        if self._critic is not None:
            self._critic.restore(checkpoint)

    def _extra_files(self) -> Iterable[tuple[str, bytes]]:
        return () if self._critic is None else (self._critic.file(),)

    # --- one claim

    def _step(self, train: Train) -> dict[str, float]:
        bare = msgspec.structs.replace(train, samples=(), batches=())
        if self._ranks is None:
            (share,) = split(train.samples, 1, self._settings.algorithm.minibatches)
            return self._step_everywhere(bare, share)
        if train.minibatches:
            own = Share(train.samples, train.batches, train.minibatches)
            return self._ranks.do_sent_shares(self._step_everywhere, own, train.claim, bare)
        shares = split(train.samples, self._settings.trainer.ranks, self._settings.algorithm.minibatches)
        return self._ranks.do_shares(self._step_everywhere, shares, bare)

    def _step_everywhere(self, train: Train, share_of_batch: Share) -> dict[str, float]:
        own = self._settings
        ranks = own.trainer.ranks
        claim = claim_of(share_of_batch, self._packed.vocabulary, ranks, critic=self._critic is not None)
        steps = self._steps_of(claim)
        before: dict[str, float] = {}
        if steps and (self._critic is not None or own.algorithm.epochs * own.algorithm.minibatches > 1):
            claim, before = proximal_pass(self._packed, self._critic, claim, steps, own.trainer.token_budget, ranks)
            steps = self._steps_of(claim)
        share = own.trainer.schedule.share(self._steps)
        updates = [self._update(train, step, share) for _ in range(own.algorithm.epochs) for step in steps]
        skipped = sum(not update.finite for update in updates)
        if skipped < len(updates):
            self._steps += 1
            self._skipped_in_a_row = 0
        elif updates:
            self._count_skipped(updates[0].skipped_for)
        summary = _mean([update for update in updates if update.finite] or updates) | before
        summary |= {
            "tokens": float(sum(step.totals.tokens for step in steps)),
            "sequences": float(sum(step.totals.sequences for step in steps)),
            "learning_rate": own.trainer.learning_rate * share,
            "updates": float(len(updates) - skipped),
            "skipped": float(self._skipped),
            "skipped_now": float(skipped),
            "micro_batches": float(sum(update.micro_batches for update in updates)),
            "fed_tokens": float(sum(update.fed_tokens for update in updates)),
        }
        return {name: value for name, value in summary.items() if math.isfinite(value)}

    def _steps_of(self, claim: Claim) -> list[Step]:
        """Sequences with zero advantage, as in a group with equal rewards, skip the backward pass, unless the loss has
        other terms."""
        trainer, loss = self._settings.trainer, self._settings.algorithm.loss
        all_move = self._critic is not None or bool(loss.kl_weight or loss.entropy_weight)
        all_move = all_move or needs_every_sequence(self._surrogate)
        return steps_of(claim, trainer.token_budget, trainer.ranks, all_move=all_move)

    # --- one optimiser step

    def _update(self, train: Train, step: Step, share: float) -> Update:
        """Train on one mini-batch."""
        own = self._settings
        self._clear()
        # First, because only a backward pass leaves the weights resharded, with gradients on every rank.
        with torch.no_grad():
            seen = self._passes(step.still, step)
        metrics = over_ranks(self._passes(step.moving, step) + seen, own.trainer.ranks)
        summary = metrics.summary()
        summary["grad_norm"] = clip(self._model.parameters(), own.trainer.max_grad_norm)
        if self._critic is not None:
            summary["value_grad_norm"] = self._critic.clip()
        broken = [
            name for name in ("loss", "grad_norm", "value_grad_norm") if not math.isfinite(summary.get(name, 0.0))
        ]
        skipped_for = ""
        if broken:
            values = ", ".join(f"{name} {summary[name]:g}" for name in broken)
            skipped_for = self._skip(train, f"{values}: {self._culprit(step.rows)}")
        else:
            self._apply(share)
        self._clear()
        parts = step.moving, step.still
        return Update(summary, skipped_for, sum(part.batches for part in parts), sum(part.tokens for part in parts))

    def _passes(self, part: Part, step: Step) -> Metrics:
        """Forward and, where gradients are enabled, backward over this rank's micro-batches of a part."""
        metrics = Metrics()
        for batch in part.own:
            loss, measured = self._loss(batch, step)
            if loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
            metrics = metrics + measured
        for _ in range(part.fillers):
            # All ranks gather the layers in every pass, including ranks with nothing left to compute.
            loss, _nothing = self._loss(filler_batch(), step)
            if loss.requires_grad:
                (0.0 * loss).backward()  # type: ignore[no-untyped-call]
        return metrics

    def _clear(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        if self._critic is not None:
            self._critic.clear()

    def _loss(self, batch: MicroBatch, step: Step) -> tuple[torch.Tensor, Metrics]:
        """Contribution of one micro-batch to the loss of the mini-batch."""
        own = self._settings
        scores = self._packed.scores(
            batch, entropy=own.algorithm.loss.entropy_weight > 0, hidden=self._critic is not None
        )
        reference = None
        if self._reference is not None:
            with torch.no_grad():
                reference = self._reference.scores(batch).logprobs
        members = batch.items
        device = scores.logprobs.device
        packed = PackedBatch(
            logprobs=scores.logprobs,
            behaviour=torch.from_numpy(np.concatenate([member.behaviour for member in members])).to(device),
            advantages=torch.from_numpy(np.concatenate([member.advantages for member in members])).to(device),
            sequence=torch.from_numpy(
                np.repeat(np.arange(len(members)), [member.targets.size for member in members])
            ).to(device),
            sequences=len(members),
            total_tokens=step.totals.tokens,
            total_sequences=step.totals.sequences,
            proximal=self._proximal(scores.logprobs, members),
            reference=reference,
            entropy=scores.entropy,
        )
        try:
            loss, metrics = policy_loss(own.algorithm.loss, packed, self._surrogate)
        except BadLoss as error:
            raise Untrainable(str(error)) from error
        if self._critic is not None and scores.hidden is not None:
            of_values, measured = self._critic.loss(scores.hidden, members, step.totals.tokens)
            loss, metrics = loss + of_values, metrics + measured
        return loss, metrics

    def _proximal(self, logprobs: torch.Tensor, members: Sequence[Item]) -> torch.Tensor | None:
        """Only a correction distinguishes the proximal from the behaviour policy; without one, the ratio spans both."""
        if self._settings.algorithm.loss.correction.kind is CorrectionKind.NONE:
            return None
        known = [member.proximal for member in members if member.proximal is not None]
        return torch.from_numpy(np.concatenate(known)).to(logprobs.device) if known else logprobs.detach()

    def _apply(self, share: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = self._settings.trainer.learning_rate * share
        self._optimizer.step()
        if self._critic is not None:
            self._critic.apply(share)

    def _skip(self, train: Train, cause: str) -> str:
        """Record that the step was not made; returns the reason."""
        self._skipped += 1
        what = f"the step of claim {train.claim} to {train.version} is not finite ({cause})"
        logger.warning("%s and was skipped; the weights are unchanged", what)
        return what

    def _count_skipped(self, cause: str) -> None:
        """Count a claim without a step; raises after `max_skipped` in a row."""
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row >= self._settings.trainer.max_skipped:
            raise Untrainable(
                f"{cause}. Skipped {self._skipped_in_a_row} claims in a row and {self._skipped} steps so far; the "
                "weights are unchanged. Check the batch's advantages and log-probabilities, or lower the learning "
                "rate."
            )

    def _culprit(self, rows: Sequence[Item]) -> str:
        """Most likely cause of a non-finite step. Collective."""
        for name, parameter in self._model.named_parameters():
            if not whole(parameter).isfinite().all():
                return f"the weights of {name} are not finite"
        found = next((problem for row in rows if (problem := _problem(row))), "")
        kind = self._settings.algorithm.loss.kind
        where = "computation" if isinstance(kind, PolicyLoss) else f"model or the loss {kind}"
        return next(
            (each for each in of_each_rank(found, self._settings.trainer.ranks) if each),
            f"inputs and weights are finite, so the {where} overflowed",
        )


def _problem(row: Item) -> str:
    """What of a row is not finite; empty if all is."""
    if not np.isfinite(row.advantages).all():
        worst = row.advantages[~np.isfinite(row.advantages)][0]
        return f"trajectory {row.trajectory} has advantage {worst:g}"
    if not np.isfinite(row.behaviour).all():
        return f"trajectory {row.trajectory} has non-finite log-probabilities from the engine"
    return ""


def _mean(updates: Sequence[Update]) -> dict[str, float]:
    """Mean over the steps of a claim. A claim without trained tokens is reported as a step that changes nothing."""
    metrics = {"loss": 0.0, "ratio_mean": 0.0, "mismatch": 0.0, "grad_norm": 0.0}
    for name in {name: None for update in updates for name in update.metrics}:
        values = [update.metrics[name] for update in updates if name in update.metrics]
        metrics[name] = max(values) if name.startswith("max_") else math.fsum(values) / len(values)
    return metrics
