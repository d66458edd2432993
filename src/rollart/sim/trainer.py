"""A simulated trainer: the time that training and publishing take, and versions that can be verified.

Commands run one after another and each is answered once by `Trained`, `Published` or `TrainerFailed`; a claim that was
trained, and a version that was published here, is answered from memory when it is asked for again. The buckets of a
published version have the model's nominal sizes; what is stored for each is a few bytes of version and index.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollart.ports.weights import WeightStore
from rollart.ports.worker import Advance
from rollart.sim.hardware import ModelProfile, Roofline
from rollart.types.errors import InvariantBroken, WeightError
from rollart.types.ids import ClaimId
from rollart.types.messages import (
    Publish,
    Published,
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


class SimTrainer:
    """One trainer of `ranks` devices. Settings:

    hardware: Hardware    model: ModelProfile    ranks: int    store: WeightStore    push_gb_s: float
    """

    def __init__(self, settings: Mapping[str, Any], _wake: Callable[[], None]) -> None:
        self._model: ModelProfile = settings["model"]
        self._roofline = Roofline(settings["hardware"], self._model, settings["ranks"])
        self._store: WeightStore = settings["store"]
        self._push_gb_s: float = settings["push_gb_s"]
        self._commands: list[WorkerCommand] = []
        self._queue: deque[TrainerCommand] = deque()
        self._ends_at = 0.0
        """When the first command of the queue ends."""
        self._trained: dict[ClaimId, Trained] = {}
        self._published: dict[Version, Published] = {}
        self._parent: Version | None = None

    def info(self) -> TrainerInfo:
        return TrainerInfo(parameters=self._model.params)

    def post(self, commands: Sequence[WorkerCommand]) -> None:
        self._commands.extend(commands)

    def advance(self, now: float) -> Advance:
        events: list[WorkerEvent] = []
        self._work(now, events)
        commands, self._commands = self._commands, []
        for command in commands:
            if not isinstance(command, Train | Publish):
                raise InvariantBroken(f"a trainer does not take {type(command).__name__}")
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
            events.append(self._train(command) if isinstance(command, Train) else self._publish(command.version))
            if self._queue:
                self._ends_at += self._seconds(self._queue[0])

    def _seconds(self, command: TrainerCommand) -> float:
        """How long a command takes from its start; nothing, if its answer is known."""
        if isinstance(command, Train):
            if command.claim in self._trained:
                return 0.0
            tokens = _tokens(command)
            return self._roofline.forward_s(tokens) + self._roofline.train_s(tokens)
        if command.version in self._published or self._not_newer(command.version):
            return 0.0
        return Roofline.transfer_s(self._model.weight_bytes, self._push_gb_s)

    def _train(self, train: Train) -> TrainerEvent:
        if train.claim not in self._trained:
            metrics = {"tokens": float(_tokens(train)), "loss": 0.0}
            self._trained[train.claim] = Trained(train.claim, train.version, metrics)
        return self._trained[train.claim]

    def _not_newer(self, version: Version) -> bool:
        newest = self._store.newest()
        return newest is not None and version <= newest

    def _publish(self, version: Version) -> TrainerEvent:
        if version not in self._published:
            manifest, buckets = self._weights(version)
            try:
                self._store.publish(manifest, buckets)
            except WeightError as error:
                return TrainerFailed(None, str(error))
            self._parent = version
            self._published[version] = Published(manifest)
        return self._published[version]

    def _weights(self, version: Version) -> tuple[Manifest, list[bytes]]:
        total = self._model.weight_bytes
        sizes = [min(_BUCKET_BYTES, total - start) for start in range(0, total, _BUCKET_BYTES)]
        buckets = [f"{version}/{index}".encode() for index in range(len(sizes))]
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
    """Masked samples are in nobody's forward pass."""
    return sum(sequence.length for sample in train.samples if not sample.masked for sequence in sample.sequences)


def _same(command: TrainerCommand, other: TrainerCommand) -> bool:
    if isinstance(command, Train):
        return isinstance(other, Train) and command.claim == other.claim
    return isinstance(other, Publish) and command.version == other.version
