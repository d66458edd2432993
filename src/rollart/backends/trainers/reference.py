"""The reference trainer: a `transformers` model, AdamW and the GRPO loss, one sequence at a time.

What holds:
- a claim is trained once: a doubled `Train` is answered again and changes nothing;
- a command that fails leaves the weights as they were (nothing is written before every gradient is known to be finite);
- log-probabilities are those of `token_logprobs` at the temperature that the engines sampled with, so that the reported
  `mismatch` is the numerical difference of engine and trainer plus what the policy moved since, and nothing else;
- a trainer that starts where a checkpoint lies goes on from it, in float32 bit by bit as the one before would have.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import ConfigDict, Field

from rollart.algo.loss import policy_loss
from rollart.algo.metrics import Metrics
from rollart.algo.packed import PackedBatch
from rollart.backends.models import build_model, token_logprobs
from rollart.backends.stores.tensors import pack
from rollart.backends.trainers import training_state
from rollart.backends.trainers.checkpoint import Checkpoints, NotSaved
from rollart.config.algorithm import LossSettings
from rollart.config.base import Strict
from rollart.ports.weights import WeightStore
from rollart.ports.worker import Advance
from rollart.types.errors import InvariantBroken, WeightError
from rollart.types.ids import ClaimId
from rollart.types.messages import (
    Publish,
    Published,
    Save,
    Saved,
    SaveFailed,
    Train,
    Trained,
    TrainerFailed,
    TrainerInfo,
    WorkerCommand,
    WorkerEvent,
)
from rollart.types.tokens import TokenSequence
from rollart.types.trajectory import TrainSample
from rollart.types.versions import Version
from rollart.types.weights import Manifest

REMEMBERED_CLAIMS = 1024
"""Of so many claims a doubled `Train` is recognised."""


class ReferenceTrainerSettings(Strict):
    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    model: str | dict[str, Any]
    store: Any
    """A `WeightStore`, where versions are published."""
    seed: int = 0
    """Of the random weights of a model given by its config."""
    learning_rate: float = Field(default=1e-6, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    clip: float = Field(default=0.2, gt=0, le=1)
    max_grad_norm: float = Field(default=1.0, gt=0)
    temperature: float = Field(default=1.0, gt=0)
    """The one that the engines sample with."""
    bucket_bytes: int = Field(default=64 * 2**20, ge=1)
    keep_versions: int = Field(default=2, ge=1)
    checkpoints: str | None = None
    """The folder that `Save` writes to, and that a trainer starts from if it holds a checkpoint."""
    keep_checkpoints: int = Field(default=2, ge=1)
    dtype: str = "float32"
    device: str = "cpu"


class _Sequence(NamedTuple):
    """One sequence on the device, shifted: `targets[i]` follows `inputs[i]`."""

    inputs: torch.Tensor
    targets: torch.Tensor
    mask: torch.Tensor
    behaviour: torch.Tensor
    advantage: float


class _Refusal(Exception):
    """The batch cannot be trained; nothing was changed."""


class ReferenceTrainer:
    """A trainer worker; its factory path is `rollart.backends.trainers.reference:ReferenceTrainer`."""

    def __init__(self, settings: Mapping[str, Any], wake: Callable[[], None]) -> None:  # noqa: ARG002 - never waits
        self._settings = ReferenceTrainerSettings.model_validate(dict(settings))
        own = self._settings
        self._store: WeightStore = own.store
        self._model = build_model(own.model, dtype=own.dtype, device=own.device, seed=own.seed)
        self._vocabulary = int(self._model.config.get_text_config().vocab_size)
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=own.learning_rate, weight_decay=own.weight_decay
        )
        self._version: Version | None = None
        """What the last trained step made of the weights."""
        self._name: Version | None = None
        """What the weights were last called, by `Train` or by `Publish`: the version that can be saved."""
        self._published: list[Manifest] = []
        self._answers: dict[ClaimId, Trained | TrainerFailed] = {}
        self._skipped = 0
        self._commands: deque[WorkerCommand] = deque()
        self._checkpoints: Checkpoints | None = None
        self._saved: Version | None = None
        """The newest checkpoint."""
        if own.checkpoints is not None:
            self._checkpoints = Checkpoints(Path(own.checkpoints), keep=own.keep_checkpoints)
            self._restore(self._checkpoints)
        self._restored = self._saved

    def info(self) -> TrainerInfo:
        return TrainerInfo(
            parameters=sum(parameter.numel() for parameter in self._model.parameters()), restored=self._restored
        )

    def post(self, commands: Sequence[WorkerCommand]) -> None:
        self._commands.extend(commands)

    def advance(self, now: float) -> Advance:
        events: list[WorkerEvent] = []
        if self._commands:
            match self._commands.popleft():
                case Train() as train:
                    events.append(self._train(train))
                case Publish(version):
                    events.append(self._publish(version))
                case Save(version):
                    events.append(self._save(version))
                case other:
                    raise InvariantBroken(f"a trainer does not take {type(other).__name__}; this is a bug of rollart")
        return Advance(events, now if self._commands else None)

    def close(self) -> None:
        self._commands.clear()

    # --- training

    def _train(self, train: Train) -> Trained | TrainerFailed:
        known = self._answers.get(train.claim)
        if known is not None:
            return known
        answer: Trained | TrainerFailed
        try:
            if self._version is not None and train.version <= self._version:
                raise _Refusal(f"{train.version} is not newer than the trained {self._version}; versions only grow")
            metrics = self._optimise(self._sequences(train.samples))
        except _Refusal as refusal:
            self._optimizer.zero_grad(set_to_none=True)
            answer = TrainerFailed(train.claim, str(refusal))
        else:
            self._version = self._name = train.version
            answer = Trained(train.claim, train.version, metrics)
        self._answers[train.claim] = answer
        if len(self._answers) > REMEMBERED_CLAIMS:
            del self._answers[next(iter(self._answers))]
        return answer

    def _sequences(self, samples: Sequence[TrainSample]) -> list[_Sequence]:
        return [
            self._sequence(sample, sequence)
            for sample in samples
            if not sample.masked
            for sequence in sample.sequences
            if sequence.sampled
        ]

    def _sequence(self, sample: TrainSample, sequence: TokenSequence) -> _Sequence:
        device = self._model.device
        try:
            tokens = sequence.whole().ids()
            behaviour = sequence.logprobs()
        except ValueError as error:
            raise _Refusal(f"trajectory {sample.trajectory} cannot be trained: {error}") from error
        if not (tokens.min() >= 0 and tokens.max() < self._vocabulary):
            raise _Refusal(
                f"trajectory {sample.trajectory} has tokens from {tokens.min()} to {tokens.max()}, "
                f"but the vocabulary has {self._vocabulary}: check the codec"
            )
        ids = torch.tensor(tokens, dtype=torch.long, device=device)
        return _Sequence(
            inputs=ids[:-1],
            targets=ids[1:],
            mask=torch.tensor(sequence.action_mask()[1:], device=device),
            behaviour=torch.tensor(behaviour[1:], device=device),
            advantage=sample.advantage,
        )

    def _optimise(self, sequences: list[_Sequence]) -> dict[str, float]:
        """One step. The gradient is that of the mean over all action tokens, added up sequence by sequence."""
        tokens = sum(int(sequence.mask.sum()) for sequence in sequences)
        settings = LossSettings(clip_low=self._settings.clip, clip_high=self._settings.clip)
        metrics = Metrics()
        self._optimizer.zero_grad(set_to_none=True)
        for sequence in sequences:
            logits = self._model(sequence.inputs.unsqueeze(0), use_cache=False).logits[0]
            logprobs = token_logprobs(logits, sequence.targets, self._settings.temperature)[sequence.mask]
            part, measured = policy_loss(
                settings,
                PackedBatch(
                    logprobs=logprobs,
                    behaviour=sequence.behaviour[sequence.mask],
                    advantages=torch.full_like(logprobs, sequence.advantage, requires_grad=False),
                    sequence=torch.zeros_like(logprobs, dtype=torch.int64),
                    sequences=1,
                    total_tokens=tokens,
                    total_sequences=len(sequences),
                ),
            )
            part.backward()  # type: ignore[no-untyped-call]
            metrics = metrics + measured
        # A batch in which nothing is trained has no metrics, and is reported like one that changes nothing.
        summary = {"loss": 0.0, "ratio_mean": 0.0, "mismatch": 0.0} | metrics.summary()
        loss = summary["loss"]
        norm = float(torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._settings.max_grad_norm))
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._skipped += 1
            raise _Refusal(
                f"the step is not finite (loss {loss:g}, gradient norm {norm:g}) and was skipped; the weights are "
                f"unchanged, {self._skipped} skipped so far. Look at the batch's advantages and log-probabilities."
            )
        # In a batch without action tokens no parameter has a gradient, and AdamW leaves those as they are.
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return summary | {"grad_norm": norm, "skipped": float(self._skipped)}

    # --- publication

    def _publish(self, version: Version) -> Published | TrainerFailed:
        if self._published and self._published[-1].version == version:
            return Published(self._published[-1])  # a doubled command
        parent = self._published[-1].version if self._published else None
        manifest, buckets = pack(
            self._model.state_dict(), version=version, parent=parent, bucket_bytes=self._settings.bucket_bytes
        )
        try:
            self._store.publish(manifest, buckets)
        except WeightError as error:
            return TrainerFailed(None, f"{version} was not published: {error}")
        self._name = version
        self._published.append(manifest)
        while len(self._published) > self._settings.keep_versions:
            self._store.drop(self._published.pop(0).version)
        return Published(manifest)

    # --- checkpoints

    def _save(self, version: Version) -> Saved | SaveFailed:
        if self._checkpoints is None:
            return SaveFailed(version, f"{version} has no folder for checkpoints; set `checkpoints` of the trainer")
        if version == self._saved:
            return Saved(version)  # a doubled command
        if version != self._name:
            return SaveFailed(version, f"the weights are those of {self._name}, and only those can be saved")
        group = self._optimizer.param_groups[0]
        facts = {
            "skipped": self._skipped,
            "optimizer": {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")},
        }
        try:
            self._checkpoints.save(version, training_state.files(self._model, self._optimizer), facts)
        except NotSaved as error:
            return SaveFailed(version, str(error))
        self._saved = version
        return Saved(version)

    def _restore(self, checkpoints: Checkpoints) -> None:
        checkpoint = checkpoints.newest()
        if checkpoint is None:
            return
        training_state.restore(checkpoint, self._model, self._optimizer)
        self._skipped = int(checkpoint.facts["skipped"])
        self._version = self._name = self._saved = checkpoint.version
