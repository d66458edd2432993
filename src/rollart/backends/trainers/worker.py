"""Base class of trainer workers: ordered commands, de-duplicated claims, publication and checkpoints.

Invariants:
- A claim is trained once: a duplicate `Train` gets the same answer and changes nothing.
- A failed command leaves the weights unchanged.
- Answers come in the order of the commands, even if a version is published during the next step: `Trained` then waits
  for the `Published` before it.
- `Publish` and `Save` wait for a publication in flight; `Train` does not.
- A trainer that finds a checkpoint at start resumes from it.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from pydantic import ConfigDict, Field

from rollart.backends.trainers import training_state
from rollart.backends.trainers.checkpoint import Checkpoint, CheckpointPlace, Checkpoints, NotSaved
from rollart.backends.trainers.packing import Untrainable
from rollart.backends.trainers.publishing import Draft, Publisher, WholeDraft
from rollart.backends.trainers.remote_checkpoints import RemoteCheckpoints, open_checkpoints
from rollart.config.base import Strict
from rollart.config.training import KEEP_CHECKPOINTS, TrainerSettings
from rollart.ports.worker import Advance
from rollart.types.errors import InvariantBroken
from rollart.types.ids import ClaimId
from rollart.types.messages import (
    Publish,
    Published,
    Save,
    Saved,
    SaveFailed,
    Train,
    Trained,
    TrainerEvent,
    TrainerFailed,
    TrainerInfo,
    WorkerCommand,
    WorkerEvent,
)
from rollart.types.versions import Version
from rollart.types.weights import WeightKind

REMEMBERED_CLAIMS = 1024
"""Number of claims kept for de-duplication of `Train`."""


class TrainerWorkerSettings(Strict):
    """What a trainer is started with: the `[trainer]` of the run, and what only the run knows."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    model: str | dict[str, Any]
    model_source: Path | None = None
    """Folder of the model on the machine of the user, if it is not `model`; adapters refer to it."""
    store: Any
    """The `WeightStore` that versions are published to."""
    trainer: TrainerSettings = TrainerSettings()
    seed: int = 0
    """Seed of the random weights of a model given by its config."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature of the engines."""
    bucket_bytes: int = Field(default=64 * 2**20, ge=1)
    keep_versions: int = Field(default=2, ge=1)
    checkpoints: str | CheckpointPlace | None = None
    """Where `Save` writes to, a folder or a place on another machine; the trainer starts from the newest one there."""
    keep_checkpoints: int = Field(default=KEEP_CHECKPOINTS, ge=1)

    @property
    def source(self) -> str | dict[str, Any]:
        """The model as the user named it."""
        return self.model if self.model_source is None else str(self.model_source)


class TrainerWorker(ABC):
    """Common part of trainers; subclasses implement the step and may add to checkpoints."""

    def __init__(
        self,
        settings: TrainerWorkerSettings,
        model: Any,
        optimizer: torch.optim.Optimizer,
        *,
        layout: training_state.Layout | None = None,
        wake: Callable[[], None] | None = None,
    ) -> None:
        """With `wake`, versions are published by a thread, from `_draft`; without, synchronously.

        `layout` is what checkpoints hold; the default is the whole model.
        """
        self._model = model
        self._optimizer = optimizer
        self._layout = layout or training_state.whole_model(model)
        self._bucket_bytes = settings.bucket_bytes
        self._publisher = Publisher(settings.store, keep=settings.keep_versions, wake=wake)
        self._source_files = training_state.source_files(settings.model, model)
        self._skipped = 0
        self._version: Version | None = None
        """Version of the last trained step."""
        self._name: Version | None = None
        """Current name of the weights, from `Train` or `Publish`: the version that can be saved."""
        self._renaming: Version | None = None
        """Name of the weights once their publication succeeds."""
        self._answers: dict[ClaimId, Trained | TrainerFailed] = {}
        self._commands: deque[WorkerCommand] = deque()
        self._due: deque[Future[Any]] = deque()
        """Answers of started commands, in order."""
        self._publication: Future[Any] | None = None
        self._checkpoints: Checkpoints | RemoteCheckpoints | None = None
        self._saved: Version | None = None
        """Version of the newest checkpoint."""
        if settings.checkpoints is not None:
            self._checkpoints = open_checkpoints(settings.checkpoints, settings.keep_checkpoints)
            checkpoint = self._checkpoints.newest()
            if checkpoint is not None:
                self._restore(checkpoint)
        self._restored = self._saved

    def info(self) -> TrainerInfo:
        return TrainerInfo(
            parameters=sum(parameter.numel() for parameter in self._model.parameters()), restored=self._restored
        )

    def post(self, commands: Sequence[WorkerCommand]) -> None:
        self._commands.extend(commands)

    def advance(self, now: float) -> Advance:
        self._settle_publication()
        if self._commands and not self._blocked():
            self._due.append(self._begin(self._commands.popleft()))
            self._settle_publication()
        events: list[WorkerEvent] = []
        while self._due and self._due[0].done():
            # Re-raises an error of the publishing thread, which ends this worker.
            events.append(self._due.popleft().result())
        return Advance(events, now if self._commands and not self._blocked() else None)

    def close(self) -> None:
        self._commands.clear()
        self._publisher.close()
        if self._checkpoints is not None:
            self._checkpoints.close()

    # --- hooks for trainers

    @abstractmethod
    def _step(self, train: Train) -> dict[str, float]:
        """All optimiser steps of a claim; returns their metrics. Raises `Untrainable` with the weights unchanged."""

    def _snapshot(self) -> Mapping[str, torch.Tensor]:
        """The weights to publish, with the names and dtypes that engines get."""
        tensors: Mapping[str, torch.Tensor] = self._model.state_dict()
        return tensors

    def _kind(self) -> WeightKind:
        """Kind of the version that `_snapshot` returns."""
        return WeightKind.FULL

    def _draft(self, version: Version, parent: Version | None, kind: WeightKind) -> Draft:
        """The weights as they are now, to be published as this version."""
        return WholeDraft(version, parent, kind, self._snapshot(), self._bucket_bytes)

    def _weights_to_save(self) -> training_state.Tensors:
        return self._layout.tensors()

    def _moments_to_save(self) -> training_state.Tensors:
        return training_state.moments(self._model, self._optimizer)

    def _facts(self) -> dict[str, Any]:
        """Non-tensor contents of a checkpoint."""
        group = self._optimizer.param_groups[0]
        return {
            "skipped": self._skipped,
            "optimizer": {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")},
        }

    def _restore(self, checkpoint: Checkpoint) -> None:
        ranks, rank = self._seat()
        training_state.restore(checkpoint, self._layout, self._model, self._optimizer, ranks=ranks, rank=rank)
        self._skipped = int(checkpoint.facts["skipped"])
        self._version = self._name = self._saved = checkpoint.version

    def _seat(self) -> tuple[int, int]:
        """Number of ranks, and which of them this is."""
        return 1, 0

    def _extra_files(self) -> Iterable[tuple[str, bytes]]:
        """Further files of a checkpoint, besides model and optimiser."""
        return ()

    # --- commands

    def _blocked(self) -> bool:
        return self._publication is not None and isinstance(self._commands[0], Publish | Save)

    def _begin(self, command: WorkerCommand) -> "Future[Any]":
        match command:
            case Train():
                return _answered(self._train(command))
            case Publish(version):
                self._renaming = version
                self._publication = self._publisher.start(version, self._draft, self._kind())
                return self._publication
            case Save(version):
                return _answered(self._save(version))
            case other:
                raise InvariantBroken(f"a trainer does not accept {type(other).__name__}; this is a bug in rollart")

    def _settle_publication(self) -> None:
        if self._publication is None or not self._publication.done():
            return
        if self._renaming is not None and isinstance(self._publication.result(), Published):
            self._name = self._renaming
        self._publication = self._renaming = None

    def _train(self, train: Train) -> Trained | TrainerFailed:
        known = self._answers.get(train.claim)
        if known is not None:
            return known
        answer: Trained | TrainerFailed
        try:
            if self._version is not None and train.version <= self._version:
                raise Untrainable(f"{train.version} is not newer than the trained {self._version}; versions only grow")
            metrics = self._step(train)
        except Untrainable as refusal:
            self._optimizer.zero_grad(set_to_none=True)
            answer = TrainerFailed(train.claim, str(refusal))
        else:
            self._version = self._name = train.version
            self._renaming = None
            answer = Trained(train.claim, train.version, metrics)
        self._answers[train.claim] = answer
        if len(self._answers) > REMEMBERED_CLAIMS:
            del self._answers[next(iter(self._answers))]
        return answer

    def _save(self, version: Version) -> Saved | SaveFailed:
        if self._checkpoints is None:
            return SaveFailed(version, f"cannot save {version}: set `checkpoints` of the trainer to a folder")
        if version == self._saved:
            return Saved(version)  # a duplicate command
        if version != self._name:
            return SaveFailed(version, f"cannot save {version}: the trainer holds the weights of {self._name}")
        files = chain(
            training_state.files(
                self._layout,
                self._source_files,
                self._model.device,
                weights=self._weights_to_save,
                moments=self._moments_to_save,
            ),
            self._extra_files(),
        )
        try:
            self._checkpoints.save(version, files, self._facts())
        except NotSaved as error:
            return SaveFailed(version, str(error))
        self._saved = version
        return Saved(version)


def _answered(event: TrainerEvent) -> "Future[Any]":
    future: Future[Any] = Future()
    future.set_result(event)
    return future
