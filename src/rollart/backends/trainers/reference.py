"""Reference trainer: a `transformers` model, AdamW and the GRPO loss, one sequence at a time.

Invariants, besides those of every trainer (`worker`):
- Nothing is written before every gradient is known to be finite; a non-finite step is `TrainerFailed`.
- Log-probabilities come from `token_logprobs` at the engines' sampling temperature, so the reported `mismatch` is
  exactly the numerical difference between engine and trainer plus the policy's movement since.
- Training resumes from a checkpoint as if it had never stopped, bit for bit in float32.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rollart.algo.loss import policy_loss
from rollart.algo.metrics import Metrics
from rollart.algo.packed import PackedBatch
from rollart.backends.models import build_model, token_logprobs
from rollart.backends.trainers.packing import Untrainable, turn_advantages, turns_of
from rollart.backends.trainers.worker import TrainerWorker, TrainerWorkerSettings
from rollart.config.algorithm import LossSettings
from rollart.types.messages import Train
from rollart.types.tokens import TokenSequence
from rollart.types.trajectory import TrainSample


class _Sequence(NamedTuple):
    """One sequence on the device, shifted: `targets[i]` follows `inputs[i]`."""

    inputs: torch.Tensor
    targets: torch.Tensor
    mask: torch.Tensor
    behaviour: torch.Tensor
    advantages: torch.Tensor
    """0 where `targets` are not actions."""


class ReferenceTrainer(TrainerWorker):
    """A trainer worker; its factory path is `rollart.backends.trainers.reference:ReferenceTrainer`."""

    def __init__(self, settings: Mapping[str, Any], wake: Callable[[], None]) -> None:  # noqa: ARG002 - never waits
        own = self._settings = TrainerWorkerSettings.model_validate(dict(settings))
        model = build_model(own.model, dtype=own.trainer.dtype, device=own.trainer.device, seed=own.seed)
        self._vocabulary = int(model.config.get_text_config().vocab_size)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=own.trainer.learning_rate, weight_decay=own.trainer.weight_decay
        )
        super().__init__(own, model, optimizer)

    def _step(self, train: Train) -> dict[str, float]:
        return self._optimise(self._sequences(train.samples))

    def _sequences(self, samples: Sequence[TrainSample]) -> list[_Sequence]:
        return [
            self._sequence(sample, sequence, turn_advantages(sample)[turns])
            for sample in samples
            if not sample.masked
            for sequence, turns in zip(sample.sequences, turns_of(sample), strict=True)
            if sequence.sampled
        ]

    def _sequence(self, sample: TrainSample, sequence: TokenSequence, of_actions: NDArray[np.float32]) -> _Sequence:
        device = self._model.device
        try:
            tokens = sequence.whole().ids()
            behaviour = sequence.logprobs()
        except ValueError as error:
            raise Untrainable(f"trajectory {sample.trajectory} cannot be trained: {error}") from error
        if not (tokens.min() >= 0 and tokens.max() < self._vocabulary):
            raise Untrainable(
                f"trajectory {sample.trajectory} has token ids from {tokens.min()} to {tokens.max()}, "
                f"but the vocabulary size is {self._vocabulary}: check the codec"
            )
        mask = sequence.action_mask()
        advantages = np.zeros(sequence.length, dtype=np.float32)
        advantages[mask] = of_actions
        ids = torch.tensor(tokens, dtype=torch.long, device=device)
        return _Sequence(
            inputs=ids[:-1],
            targets=ids[1:],
            mask=torch.tensor(mask[1:], device=device),
            behaviour=torch.tensor(behaviour[1:], device=device),
            advantages=torch.tensor(advantages[1:], device=device),
        )

    def _optimise(self, sequences: list[_Sequence]) -> dict[str, float]:
        """One step. The gradient is that of the mean over all action tokens, accumulated sequence by sequence."""
        tokens = sum(int(sequence.mask.sum()) for sequence in sequences)
        metrics = Metrics()
        self._optimizer.zero_grad(set_to_none=True)
        for sequence in sequences:
            logits = self._model(sequence.inputs.unsqueeze(0), use_cache=False).logits[0]
            logprobs = token_logprobs(logits, sequence.targets, self._settings.temperature)[sequence.mask]
            part, measured = policy_loss(
                LossSettings(),
                PackedBatch(
                    logprobs=logprobs,
                    behaviour=sequence.behaviour[sequence.mask],
                    advantages=sequence.advantages[sequence.mask],
                    sequence=torch.zeros_like(logprobs, dtype=torch.int64),
                    sequences=1,
                    total_tokens=tokens,
                    total_sequences=len(sequences),
                ),
            )
            part.backward()  # type: ignore[no-untyped-call]
            metrics = metrics + measured
        # A batch without trained tokens has no metrics and is reported as a step that changes nothing.
        summary = {"loss": 0.0, "ratio_mean": 0.0, "mismatch": 0.0} | metrics.summary()
        loss = summary["loss"]
        norm = float(torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._settings.trainer.max_grad_norm))
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._skipped += 1
            raise Untrainable(
                f"skipped a step that is not finite (loss {loss:g}, gradient norm {norm:g}); the weights are "
                f"unchanged, {self._skipped} skipped so far. Check the batch's advantages and log-probabilities."
            )
        # Without action tokens no parameter has a gradient, and AdamW leaves all of them unchanged.
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return summary | {"grad_norm": norm, "skipped": float(self._skipped)}
