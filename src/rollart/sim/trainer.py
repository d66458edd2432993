"""Simulated trainer: the time that training and publishing take, and verifiable versions.

Commands run one after another, and each is answered once by `Trained`, `Published` or `TrainerFailed`, `Saved` or
`SaveFailed`. A repeated command for a trained claim, or for a version already published or saved, is answered from
memory. The buckets of a published version have the model's nominal sizes, but only a few bytes are stored for each: a
digest of the sequence of trained claims, so equal digests mean equal histories, whatever the version.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollart.ports.weights import WeightStore
from rollart.ports.worker import Advance
from rollart.sim.checkpoints import SimCheckpoints
from rollart.sim.hardware import ModelProfile, Roofline
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
    TrainerCommand,
    TrainerEvent,
    TrainerFailed,
    TrainerInfo,
    WorkerCommand,
    WorkerEvent,
)
from rollart.types.versions import Version
from rollart.types.weights import Manifest, TensorEntry, WeightKind, bucket_digest

_BUCKET_BYTES = 1_000_000_000
_OPTIMIZER_BYTES_PER_PARAM = 12
"""Adam in mixed precision: the 32-bit copy of the weights and two moments."""
_SAVE_GB_S_PER_RANK = 1.0
"""Every rank writes its shard; a typical rate of parallel file systems, an assumption."""


class SimTrainer:
    """One trainer of `ranks` devices. Settings:

    hardware: Hardware    model: ModelProfile    ranks: int    store: WeightStore    push_gb_s: float
    checkpoints: SimCheckpoints | None = None       without, every `Save` is `SaveFailed`
    epochs: int = 1                                 epochs per claim
    save_s: float                                   default: weights and optimiser at 1 GB/s per rank
    """

    def __init__(self, settings: Mapping[str, Any], _wake: Callable[[], None]) -> None:
        self._model: ModelProfile = settings["model"]
        self._roofline = Roofline(settings["hardware"], self._model, settings["ranks"])
        self._store: WeightStore = settings["store"]
        self._epochs: int = settings.get("epochs", 1)
        self._push_gb_s: float = settings["push_gb_s"]
        self._checkpoints: SimCheckpoints | None = settings.get("checkpoints")
        save_bytes = self._model.weight_bytes + _OPTIMIZER_BYTES_PER_PARAM * self._model.params
        self._save_s: float = settings.get(
            "save_s", Roofline.transfer_s(save_bytes, settings["ranks"] * _SAVE_GB_S_PER_RANK)
        )
        self._commands: list[WorkerCommand] = []
        self._queue: deque[TrainerCommand] = deque()
        self._ends_at = 0.0
        """When the first command of the queue ends."""
        self._trained: dict[ClaimId, Trained] = {}
        self._published: dict[Version, Published] = {}
        self._parent: Version | None = None
        newest = self._checkpoints.newest() if self._checkpoints else None
        self._restored = newest.version if newest else None
        self._version = self._restored
        """Current name of the weights, from `Train` or `Publish`: the version that can be saved."""
        self._weights = newest.weights if newest else "initial"
        """Stands for the weights: a digest of the claims that made them."""

    def info(self) -> TrainerInfo:
        return TrainerInfo(parameters=self._model.params, restored=self._restored)

    def post(self, commands: Sequence[WorkerCommand]) -> None:
        self._commands.extend(commands)

    def advance(self, now: float) -> Advance:
        events: list[WorkerEvent] = []
        self._work(now, events)
        commands, self._commands = self._commands, []
        for command in commands:
            if not isinstance(command, Train | Publish | Save):
                raise InvariantBroken(f"a trainer does not accept {type(command).__name__}")
            if not any(_same(command, other) for other in self._queue):
                self._queue.append(command)
                if len(self._queue) == 1:
                    self._ends_at = now + self._seconds(command)
        self._work(now, events)
        return Advance(events, self._ends_at if self._queue else None)

    def close(self) -> None:
        self._commands.clear()
        self._queue.clear()

    def _work(self, now: float, events: list[WorkerEvent]) -> None:
        while self._queue and self._ends_at <= now:
            command = self._queue.popleft()
            events.append(self._answer(command))
            if self._queue:
                self._ends_at += self._seconds(self._queue[0])

    def _answer(self, command: TrainerCommand) -> TrainerEvent:
        match command:
            case Train():
                return self._train(command)
            case Publish(version):
                return self._publish(version)
            case Save(version):
                return self._save(version)

    def _seconds(self, command: TrainerCommand) -> float:
        """Duration of a command; 0 if its answer is already known."""
        if isinstance(command, Train):
            if command.claim in self._trained:
                return 0.0
            tokens = _tokens(command)
            return self._roofline.forward_s(tokens) + self._epochs * self._roofline.train_s(tokens)
        if isinstance(command, Save):
            return 0.0 if self._already_saved(command.version) or self._unsavable(command.version) else self._save_s
        if command.version in self._published or self._not_newer(command.version):
            return 0.0
        return Roofline.transfer_s(self._model.weight_bytes, self._push_gb_s)

    def _train(self, train: Train) -> TrainerEvent:
        if train.claim not in self._trained:
            metrics = {"tokens": float(_tokens(train)), "loss": 0.0}
            self._trained[train.claim] = Trained(train.claim, train.version, metrics)
            self._version = train.version
            self._weights = hashlib.blake2b(f"{self._weights}/{train.claim}".encode(), digest_size=16).hexdigest()
        return self._trained[train.claim]

    def _not_newer(self, version: Version) -> bool:
        newest = self._store.newest()
        return newest is not None and version <= newest

    def _publish(self, version: Version) -> TrainerEvent:
        if version not in self._published:
            manifest, buckets = self._manifest(version)
            try:
                self._store.publish(manifest, buckets)
            except WeightError as error:
                return TrainerFailed(None, str(error))
            self._parent = self._version = version
            self._published[version] = Published(manifest)
        return self._published[version]

    def _save(self, version: Version) -> TrainerEvent:
        if self._already_saved(version):
            return Saved(version)
        reason = self._unsavable(version)
        if reason or self._checkpoints is None:
            return SaveFailed(version, reason)
        self._checkpoints.complete(version, self._weights)
        return Saved(version)

    def _already_saved(self, version: Version) -> bool:
        newest = self._checkpoints.newest() if self._checkpoints else None
        return newest is not None and newest.version == version

    def _unsavable(self, version: Version) -> str:
        """Why the version cannot be saved; empty if it can."""
        if self._checkpoints is None:
            return f"cannot save {version}: set `checkpoints` of the trainer"
        if version != self._version:
            return f"cannot save {version}: the trainer holds the weights of {self._version}"
        newest = self._checkpoints.newest()
        if newest is not None and version < newest.version:
            return f"{version} is older than the checkpoint of {newest.version}: versions only grow"
        return ""

    def _manifest(self, version: Version) -> tuple[Manifest, list[bytes]]:
        total = self._model.weight_bytes
        sizes = [min(_BUCKET_BYTES, total - start) for start in range(0, total, _BUCKET_BYTES)]
        buckets = [f"{self._weights}/{index}".encode() for index in range(len(sizes))]
        manifest = Manifest(
            version=version,
            parent=self._parent,
            kind=WeightKind.FULL,
            tensors=tuple(
                TensorEntry(f"bucket.{index}", "uint8", (size,), index, 0, size) for index, size in enumerate(sizes)
            ),
            bucket_bytes=tuple(sizes),
            digests=tuple(bucket_digest(bucket) for bucket in buckets),
        )
        return manifest, buckets


def _tokens(train: Train) -> int:
    """Masked samples are not computed."""
    return sum(sequence.length for sample in train.samples if not sample.masked for sequence in sample.sequences)


def _same(command: TrainerCommand, other: TrainerCommand) -> bool:
    if isinstance(command, Train):
        return isinstance(other, Train) and command.claim == other.claim
    return type(other) is type(command) and command.version == other.version
