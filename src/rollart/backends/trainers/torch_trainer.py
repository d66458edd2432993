"""The torch trainer: any causal language model of `transformers`, on packed rows without padding.

    Train ──► items ──► micro-batches ≤ token_budget ──► log-probabilities ──► loss, backward ──► clip, AdamW
    Publish ──► a copy of the weights ──► thread: buckets, digests, store           meanwhile the next Train may run

What holds, besides what holds of every trainer (`worker`):
- loss and gradient are those of the whole batch, however it is cut and whoever shares a prompt: normalisers are those
  of the batch, and gradients of micro-batches add up;
- one step per claim, so the weights before the first update are those of the forward pass: the proximal policy, where
  the loss asks for one, costs nothing, and `mismatch` compares it with what the engines reported, every step;
- a step whose loss or gradient is not finite is skipped: weights, optimiser and schedule are as they were, the log
  names the cause, and `Trained` says `skipped_now` = 1. Its version is the new one all the same, because the claim is
  spent and the run goes on: that version has the weights of the one before, and can be published and saved. The
  `max_skipped`-th in a row is `TrainerFailed`, which stops the run;
- parameters are float32, whatever the layers are computed in: with bfloat16 they are the master weights that the
  optimiser needs, checkpoints hold them, and what is published is converted;
- after a restore training goes on, in float32 bit by bit as it would have.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field

from rollart.algo.loss import policy_loss
from rollart.algo.metrics import Metrics
from rollart.algo.packed import PackedBatch
from rollart.backends.models import build_model
from rollart.backends.trainers.checkpoint import Checkpoint
from rollart.backends.trainers.packed_model import PackedModel
from rollart.backends.trainers.packing import Item, MicroBatch, Untrainable, items, micro_batches
from rollart.backends.trainers.publishing import Snapshot
from rollart.backends.trainers.schedule import Schedule
from rollart.backends.trainers.worker import TrainerWorker, TrainerWorkerSettings
from rollart.config.algorithm import CorrectionKind, LossSettings
from rollart.types.messages import Train

logger = logging.getLogger(__name__)


class TorchTrainerSettings(TrainerWorkerSettings):
    token_budget: int = Field(default=2048, ge=1)
    """Tokens of one forward and backward pass; memory grows with it, the result does not depend on it.

    Enough for a CPU, where larger tensors only cost page faults; a GPU wants as many as its memory holds.
    """
    loss: LossSettings = LossSettings()
    schedule: Schedule = Schedule()
    betas: tuple[float, float] = (0.9, 0.999)
    dtype: Literal["float32", "bfloat16"] = "float32"
    """In which layers are computed and weights are published."""
    gradient_checkpointing: bool = False
    max_skipped: int = Field(default=3, ge=1)
    """So many steps in a row that are not finite stop the run."""


class TorchTrainer(TrainerWorker):
    """A trainer worker; its factory path is `rollart.backends.trainers.torch_trainer:TorchTrainer`."""

    def __init__(self, settings: Mapping[str, Any], wake: Callable[[], None]) -> None:
        own = self._settings = TorchTrainerSettings.model_validate(dict(settings))
        self._packed = self._build()
        self._reference = self._build() if own.loss.kl_weight else None
        """Frozen: the weights of the start, not those of a checkpoint."""
        self._published_as = Snapshot(getattr(torch, own.dtype))
        self._steps = 0
        self._skipped_in_a_row = 0
        model = self._packed.model
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=own.learning_rate, weight_decay=own.weight_decay, betas=own.betas, fused=True
        )
        super().__init__(own, model, optimizer, wake=wake)

    def _build(self) -> PackedModel:
        own = self._settings
        return PackedModel(
            build_model(own.model, dtype="float32", device=own.device, seed=own.seed),
            temperature=own.temperature,
            compute=getattr(torch, own.dtype),
            gradient_checkpointing=own.gradient_checkpointing,
        )

    def _snapshot(self) -> Mapping[str, torch.Tensor]:
        return self._published_as.take(self._model.state_dict())

    def _facts(self) -> dict[str, Any]:
        return super()._facts() | {"steps": self._steps, "skipped_in_a_row": self._skipped_in_a_row}

    def _restore(self, checkpoint: Checkpoint) -> None:
        super()._restore(checkpoint)
        self._steps = int(checkpoint.facts["steps"])
        self._skipped_in_a_row = int(checkpoint.facts["skipped_in_a_row"])

    # --- one step

    def _step(self, train: Train) -> dict[str, float]:
        own = self._settings
        rows = items(train.samples, self._packed.vocabulary)
        batches = micro_batches(rows, own.token_budget)
        self._optimizer.zero_grad(set_to_none=True)
        metrics = Metrics()
        for batch in batches:
            loss, measured = self._loss(batch, rows)
            loss.backward()  # type: ignore[no-untyped-call]
            metrics = metrics + measured
        # A batch in which nothing is trained has no metrics, and is reported like one that changes nothing.
        summary = {"loss": 0.0, "ratio_mean": 0.0, "mismatch": 0.0} | metrics.summary()
        norm = float(torch.nn.utils.clip_grad_norm_(self._model.parameters(), own.max_grad_norm))
        rate = own.learning_rate * own.schedule.share(self._steps)
        finite = math.isfinite(summary["loss"]) and math.isfinite(norm)
        if finite:
            self._skipped_in_a_row = 0
            self._apply(rate, trained=bool(rows))
        else:
            self._skip(train, f"loss {summary['loss']:g}, gradient norm {norm:g}: {self._culprit(rows)}")
        self._optimizer.zero_grad(set_to_none=True)
        summary |= {
            "grad_norm": norm,
            "learning_rate": rate,
            "skipped": float(self._skipped),
            "skipped_now": float(not finite),
            "micro_batches": float(len(batches)),
            "fed_tokens": float(sum(batch.tokens for batch in batches)),
        }
        return {name: value for name, value in summary.items() if math.isfinite(value)}

    def _loss(self, batch: MicroBatch, rows: Sequence[Item]) -> tuple[torch.Tensor, Metrics]:
        """The share of one micro-batch in the loss of the batch."""
        own = self._settings
        scores = self._packed.scores(batch, entropy=own.loss.entropy_weight > 0)
        proximal = scores.logprobs.detach() if own.loss.correction.kind is not CorrectionKind.NONE else None
        reference = None
        if self._reference is not None:
            with torch.no_grad():
                reference = self._reference.scores(batch).logprobs
        members = batch.items
        lengths = [member.targets.size for member in members]
        device = scores.logprobs.device
        return policy_loss(
            own.loss,
            PackedBatch(
                logprobs=scores.logprobs,
                behaviour=torch.from_numpy(np.concatenate([member.behaviour for member in members])).to(device),
                advantages=torch.from_numpy(
                    np.repeat(np.array([member.advantage for member in members], dtype=np.float32), lengths)
                ).to(device),
                sequence=torch.from_numpy(np.repeat(np.arange(len(members)), lengths)).to(device),
                sequences=len(members),
                total_tokens=sum(row.targets.size for row in rows),
                total_sequences=len(rows),
                proximal=proximal,
                reference=reference,
                entropy=scores.entropy,
            ),
        )

    def _apply(self, rate: float, *, trained: bool) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._steps += trained

    def _skip(self, train: Train, cause: str) -> None:
        self._skipped += 1
        self._skipped_in_a_row += 1
        in_a_row = self._skipped_in_a_row
        what = f"the step of claim {train.claim} to {train.version} is not finite ({cause})"
        if in_a_row >= self._settings.max_skipped:
            raise Untrainable(
                f"{what}. It is the {in_a_row}. in a row, {self._skipped} were skipped so far, and the weights are "
                "those of before. Look at the batch's advantages and log-probabilities, or lower the learning rate."
            )
        logger.warning("%s and was skipped: the weights are unchanged, %d in a row", what, in_a_row)

    def _culprit(self, rows: Sequence[Item]) -> str:
        """Who it was, as far as that can be told from the outside."""
        for row in rows:
            if not math.isfinite(row.advantage):
                return f"trajectory {row.trajectory} has the advantage {row.advantage:g}"
            if not np.isfinite(row.behaviour).all():
                return f"trajectory {row.trajectory} has log-probabilities from the engine that are not finite"
        for name, parameter in self._model.named_parameters():
            if not parameter.isfinite().all():
                return f"the weights of {name} are not finite"
        return "its inputs and the weights are finite, so it overflowed on the way"
