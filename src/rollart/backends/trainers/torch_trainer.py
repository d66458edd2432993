"""The torch trainer: any causal language model of `transformers`, on packed rows without padding.

    Train ──► items ──► mini-batches, one optimiser step each, `epochs` times over
    a step ──► micro-batches ≤ token_budget ──► log-probabilities ──► loss, backward ──► clip, AdamW
               those without any advantage are measured, and need no backward pass
    Publish ──► a copy of the weights ──► thread: buckets, digests, store           meanwhile the next Train may run

What holds, besides what holds of every trainer (`worker`):
- loss and gradient are those of the whole mini-batch, however it is cut and whoever shares a prompt: normalisers are
  those of the mini-batch, and gradients of micro-batches add up;
- the proximal policy is that of the weights before the first update on a claim. With one step per claim these are the
  weights of the forward pass, and it costs nothing; with several, or with a critic, there is a pass before the first
  of them (`look_ahead`). `mismatch` compares it with what the engines reported, every claim;
- mini-batches are whole trajectories, cut the same way every time; the learning rate is the same for all steps of a
  claim, and schedules count claims;
- a step whose loss or gradient is not finite is skipped: weights, optimiser and schedule are as they were, the log
  names the cause, and `Trained` counts it in `skipped_now`. The version is the new one all the same, because the claim
  is spent and the run goes on: if all its steps were skipped that version has the weights of the one before, and can be
  published and saved. The `max_skipped`-th claim in a row without a step is `TrainerFailed`, which stops the run;
- parameters are float32, whatever the layers are computed in: with bfloat16 they are the master weights that the
  optimiser needs, checkpoints hold them, and what is published is converted;
- after a restore training goes on, in float32 bit by bit as it would have;
- several ranks are one trainer: weights, versions, checkpoints and metrics are those of one process, up to the order in
  which numbers are added. All ranks run the methods `…_everywhere` together, on the same sequences, each its share of
  the micro-batches (`ranks`, `sharding`, `dealing`).
"""

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np
import torch
from pydantic import Field

from rollart.algo.loss import policy_loss
from rollart.algo.metrics import Metrics
from rollart.algo.packed import PackedBatch
from rollart.backends.models import build_model, keep_freed_memory
from rollart.backends.trainers import training_state
from rollart.backends.trainers.checkpoint import Checkpoint
from rollart.backends.trainers.critic import Critic
from rollart.backends.trainers.dealing import deal, shortest
from rollart.backends.trainers.look_ahead import Claim, claim_of, look_ahead
from rollart.backends.trainers.lora import Adapter
from rollart.backends.trainers.packed_model import PackedModel
from rollart.backends.trainers.packing import Item, MicroBatch, Untrainable, mini_batches
from rollart.backends.trainers.publishing import Snapshot
from rollart.backends.trainers.ranks import Member, Ranks
from rollart.backends.trainers.sharding import clip, over_ranks, shard, whole
from rollart.backends.trainers.worker import TrainerWorker, TrainerWorkerSettings
from rollart.config.algorithm import CorrectionKind, CriticSettings, LossSettings
from rollart.config.training import LoraSettings, Schedule
from rollart.ports.worker import Advance
from rollart.types.errors import RequestError
from rollart.types.messages import Train
from rollart.types.weights import WeightKind

T = TypeVar("T")

logger = logging.getLogger(__name__)


class TorchTrainerSettings(TrainerWorkerSettings):
    token_budget: int = Field(default=2048, ge=1)
    """Tokens of one forward and backward pass; memory grows with it, the result does not depend on it.

    Enough for a CPU, where larger tensors only cost page faults; a GPU wants as many as its memory holds.
    """
    loss: LossSettings = LossSettings()
    epochs: int = Field(default=1, ge=1)
    """How often a claim is trained on."""
    minibatches: int = Field(default=1, ge=1)
    """Optimiser steps per epoch."""
    critic: CriticSettings | None = None
    """With it, advantages are made of values that are learnt here; those of the samples are not looked at."""
    schedule: Schedule = Schedule()
    betas: tuple[float, float] = (0.9, 0.999)
    dtype: Literal["float32", "bfloat16"] = "float32"
    """In which layers are computed and weights are published."""
    gradient_checkpointing: bool = False
    max_skipped: int = Field(default=3, ge=1)
    """So many claims in a row without a step that is finite stop the run."""
    ranks: int = Field(default=1, ge=1)
    """Over so many processes weights, gradients and optimiser are cut (FSDP2); on `cuda` each has a GPU of its own."""
    lora: LoraSettings | None = None
    """Train an adapter instead of the model."""


class _Update(NamedTuple):
    """What came of one optimiser step."""

    metrics: dict[str, float]
    skipped_for: str
    """Empty: it was made."""
    micro_batches: int
    fed_tokens: int

    @property
    def finite(self) -> bool:
        return not self.skipped_for


class TorchTrainer(TrainerWorker):
    """A trainer worker; its factory path is `rollart.backends.trainers.torch_trainer:TorchTrainer`."""

    def __init__(self, settings: Mapping[str, Any], wake: Callable[[], None], *, member: Member | None = None) -> None:
        """`member` is given to ranks other than 0: they publish and save nothing, and are told what to do."""
        own = self._settings = TorchTrainerSettings.model_validate(dict(settings))
        self._rank = 0 if member is None else member.seat.rank
        self._ranks: Ranks | None = None
        if own.ranks > 1 and member is None:
            alike = own.model_copy(update={"store": None, "checkpoints": None})
            self._ranks = Ranks(alike, own.ranks, own.device, wake)
        try:
            self._set_up(wake, member)
        except BaseException:
            self._end_ranks()
            raise

    def _set_up(self, wake: Callable[[], None], member: Member | None) -> None:
        own = self._settings
        keep_freed_memory()
        self._packed = self._build()
        self._reference = self._build() if own.loss.kl_weight else None
        """Frozen: the weights of the start, not those of a checkpoint."""
        model = self._packed.model
        self._adapter = None if own.lora is None else Adapter(model, own.lora, source=own.model, seed=own.seed)
        group = member or self._ranks
        if group is not None:
            mesh = group.meet()
            for packed in (self._packed, self._reference):
                if packed is not None:
                    shard(packed.model, mesh, getattr(torch, own.dtype))
        self._published_as = Snapshot(getattr(torch, own.dtype), "meta" if self._rank else "cpu")
        self._steps = 0
        self._skipped_in_a_row = 0
        self._critic = None if own.critic is None else self._build_critic(own.critic)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(
            trained, lr=own.learning_rate, weight_decay=own.weight_decay, betas=own.betas, fused=True
        )
        layout = None if self._adapter is None else self._adapter.layout()
        super().__init__(own, model, optimizer, layout=layout, wake=wake)

    def _build(self) -> PackedModel:
        own = self._settings
        return PackedModel(
            build_model(own.model, dtype="float32", device=own.device if own.ranks == 1 else "cpu", seed=own.seed),
            temperature=own.temperature,
            compute=getattr(torch, own.dtype),
            gradient_checkpointing=own.gradient_checkpointing,
        )

    def _build_critic(self, settings: CriticSettings) -> Critic:
        own = self._settings
        return Critic(
            settings,
            int(self._packed.model.config.get_text_config().hidden_size),
            learning_rate=own.learning_rate,
            max_grad_norm=own.max_grad_norm,
            device=torch.device(own.device),
            ranks=own.ranks,
        )

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
        """Have all ranks call this method of theirs; gives what it returned here."""
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

    def _kind(self) -> WeightKind:
        lora = self._settings.lora
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
        """Whole, one after the other, on the CPU of rank 0."""
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
                f"checkpoint {checkpoint.folder} is an adapter on another model; give the trainer the model, or the "
                "config and the seed, that it was trained on, or another folder for checkpoints"
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
        claim = claim_of(train.samples, self._packed.vocabulary, critic=self._critic is not None)
        return self._together(self._step_everywhere, msgspec.structs.replace(train, samples=()), claim)

    def _step_everywhere(self, train: Train, claim: Claim) -> dict[str, float]:
        own = self._settings
        rows = claim.rows
        before: dict[str, float] = {}
        if rows and (self._critic is not None or own.epochs * own.minibatches > 1):
            rows, before = look_ahead(self._packed, self._critic, claim, own.token_budget, own.ranks, self._rank)
        share = own.schedule.share(self._steps)
        updates = [
            self._update(train, part, share) for _ in range(own.epochs) for part in mini_batches(rows, own.minibatches)
        ]
        skipped = sum(not update.finite for update in updates)
        if skipped < len(updates):
            self._steps += 1
            self._skipped_in_a_row = 0
        elif updates:
            self._count_skipped(updates[0].skipped_for)
        summary = _mean([update for update in updates if update.finite] or updates) | before
        summary |= {
            "tokens": float(sum(row.targets.size for row in rows)),
            "sequences": float(len(rows)),
            "learning_rate": own.learning_rate * share,
            "updates": float(len(updates) - skipped),
            "skipped": float(self._skipped),
            "skipped_now": float(skipped),
            "micro_batches": float(sum(update.micro_batches for update in updates)),
            "fed_tokens": float(sum(update.fed_tokens for update in updates)),
        }
        return {name: value for name, value in summary.items() if math.isfinite(value)}

    # --- one optimiser step

    def _update(self, train: Train, rows: Sequence[Item], share: float) -> _Update:
        """Of one mini-batch."""
        own = self._settings
        self._clear()
        moving, still = self._moving(rows)
        # First, because only a backward pass leaves the weights of several ranks cut, each with its gradient.
        with torch.no_grad():
            seen, cut_still = self._passes(still, rows)
        metrics, cut = self._passes(moving, rows)
        metrics, batches = metrics + seen, cut + cut_still
        if own.ranks > 1:
            metrics = over_ranks(metrics)
        summary = metrics.summary()
        summary["grad_norm"] = clip(self._model.parameters(), own.max_grad_norm)
        if self._critic is not None:
            summary["value_grad_norm"] = self._critic.clip()
        broken = [
            name for name in ("loss", "grad_norm", "value_grad_norm") if not math.isfinite(summary.get(name, 0.0))
        ]
        skipped_for = ""
        if broken:
            told = ", ".join(f"{name} {summary[name]:g}" for name in broken)
            skipped_for = self._skip(train, f"{told}: {self._culprit(rows)}")
        else:
            self._apply(share)
        self._clear()
        return _Update(summary, skipped_for, len(batches), sum(batch.tokens for batch in batches))

    def _moving(self, rows: Sequence[Item]) -> tuple[Sequence[Item], Sequence[Item]]:
        """Those that the gradient comes from, and those that are only measured: where all of a group got the same
        reward nobody has an advantage, and nothing to go back for."""
        loss = self._settings.loss
        if self._critic is not None or loss.kl_weight or loss.entropy_weight:
            return rows, ()
        moving = [row for row in rows if row.advantages.any()]
        if not moving:
            return rows, ()  # a step without gradients is no step: moments would not decay
        return moving, [row for row in rows if not row.advantages.any()]

    def _passes(self, part: Sequence[Item], rows: Sequence[Item]) -> tuple[Metrics, list[MicroBatch]]:
        """A part of the mini-batch `rows`, forward and, where gradients are wanted, backward; gives how it was cut."""
        own = self._settings
        dealt = deal(part, own.token_budget, own.ranks)
        metrics = Metrics()
        for batch in dealt.hands[self._rank]:
            loss, measured = self._loss(batch, rows)
            if loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
            metrics = metrics + measured
        for _ in range(dealt.passes - len(dealt.hands[self._rank])):
            # In every pass all ranks put the layers together, also those that have nothing left to compute.
            loss, _nothing = self._loss(shortest(rows), rows)
            if loss.requires_grad:
                (0.0 * loss).backward()  # type: ignore[no-untyped-call]
        return metrics, dealt.batches

    def _clear(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        if self._critic is not None:
            self._critic.clear()

    def _loss(self, batch: MicroBatch, rows: Sequence[Item]) -> tuple[torch.Tensor, Metrics]:
        """The share of one micro-batch in the loss of the batch."""
        own = self._settings
        scores = self._packed.scores(batch, entropy=own.loss.entropy_weight > 0, hidden=self._critic is not None)
        reference = None
        if self._reference is not None:
            with torch.no_grad():
                reference = self._reference.scores(batch).logprobs
        members = batch.items
        device = scores.logprobs.device
        total_tokens = sum(row.targets.size for row in rows)
        loss, metrics = policy_loss(
            own.loss,
            PackedBatch(
                logprobs=scores.logprobs,
                behaviour=torch.from_numpy(np.concatenate([member.behaviour for member in members])).to(device),
                advantages=torch.from_numpy(np.concatenate([member.advantages for member in members])).to(device),
                sequence=torch.from_numpy(
                    np.repeat(np.arange(len(members)), [member.targets.size for member in members])
                ).to(device),
                sequences=len(members),
                total_tokens=total_tokens,
                total_sequences=len(rows),
                proximal=self._proximal(scores.logprobs, members),
                reference=reference,
                entropy=scores.entropy,
            ),
        )
        if self._critic is not None and scores.hidden is not None:
            of_values, measured = self._critic.loss(scores.hidden, members, total_tokens)
            loss, metrics = loss + of_values, metrics + measured
        return loss, metrics

    def _proximal(self, logprobs: torch.Tensor, members: Sequence[Item]) -> torch.Tensor | None:
        """Only a correction tells the proximal policy from the one that sampled; without one, the ratio spans both."""
        if self._settings.loss.correction.kind is CorrectionKind.NONE:
            return None
        known = [member.proximal for member in members if member.proximal is not None]
        return torch.from_numpy(np.concatenate(known)).to(logprobs.device) if known else logprobs.detach()

    def _apply(self, share: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = self._settings.learning_rate * share
        self._optimizer.step()
        if self._critic is not None:
            self._critic.apply(share)

    def _skip(self, train: Train, cause: str) -> str:
        """The step is not made; gives what is wrong with it."""
        self._skipped += 1
        what = f"the step of claim {train.claim} to {train.version} is not finite ({cause})"
        logger.warning("%s and was skipped: the weights are unchanged", what)
        return what

    def _count_skipped(self, cause: str) -> None:
        """A claim without a step."""
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row >= self._settings.max_skipped:
            raise Untrainable(
                f"{cause}. It is the {self._skipped_in_a_row}. in a row, {self._skipped} were skipped so far, and the "
                "weights are those of before. Look at the batch's advantages and log-probabilities, or lower the "
                "learning rate."
            )

    def _culprit(self, rows: Sequence[Item]) -> str:
        """Who it was, as far as that can be told from the outside."""
        for name, parameter in self._model.named_parameters():
            if not whole(parameter).isfinite().all():
                return f"the weights of {name} are not finite"
        for row in rows:
            if not np.isfinite(row.advantages).all():
                worst = row.advantages[~np.isfinite(row.advantages)][0]
                return f"trajectory {row.trajectory} has the advantage {worst:g}"
            if not np.isfinite(row.behaviour).all():
                return f"trajectory {row.trajectory} has log-probabilities from the engine that are not finite"
        return "its inputs and the weights are finite, so it overflowed on the way"


def _mean(updates: Sequence[_Update]) -> dict[str, float]:
    """Over the steps of a claim. One in which nothing is trained is reported like one that changes nothing."""
    metrics = {"loss": 0.0, "ratio_mean": 0.0, "mismatch": 0.0, "grad_norm": 0.0}
    for name in {name: None for update in updates for name in update.metrics}:
        values = [update.metrics[name] for update in updates if name in update.metrics]
        metrics[name] = max(values) if name.startswith("max_") else math.fsum(values) / len(values)
    return metrics
