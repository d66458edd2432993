"""Trainers: simulated, reference, and torch in its variants. Each can be killed in the middle of a save."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from worker_settings import worker_settings

from harnesses.common import MODEL, TASK, VOCABULARY
from rollart.backends.stores.memory import MemoryStore
from rollart.backends.trainers.checkpoint import write_file
from rollart.backends.trainers.reference import ReferenceTrainer
from rollart.backends.trainers.torch_trainer import TorchTrainer
from rollart.backends.trainers.worker import TrainerWorker
from rollart.conformance.trainer import TrainerHarness
from rollart.ports.worker import Advance
from rollart.sim.checkpoints import SimCheckpoints
from rollart.sim.hardware import TINY, WIDE
from rollart.sim.store import SimStore
from rollart.sim.trainer import SimTrainer
from rollart.types.ids import GroupId, TrajectoryId
from rollart.types.messages import Save, WorkerCommand
from rollart.types.tokens import LOGPROB, TOKEN, Generated, Segment, TokenSequence, VersionRun
from rollart.types.trajectory import TrainSample, Turn
from rollart.types.versions import Version


def batch(number: int, *, real: bool, advantages: tuple[float, float] = (1.0, -1.0)) -> tuple[TrainSample, ...]:
    """A group of two, one better than the other."""
    samples = []
    for member, advantage in enumerate(advantages):
        ids = np.arange(8, dtype=TOKEN) * (member + 2) + number
        sequence = TokenSequence()
        sequence.append_context(Segment.of(ids % VOCABULARY) if real else Segment(8, None))
        tokens = Segment.of((ids + 5) % VOCABULARY) if real else Segment(8, None)
        logprobs = np.full(8, -math.log(VOCABULARY), dtype=LOGPROB).tobytes() if real else None
        sequence.append_sampled(Generated(tokens, logprobs, (VersionRun(Version(0, 0), 8),)))
        samples.append(
            TrainSample(
                trajectory=TrajectoryId(2 * number + member),
                group=GroupId(number),
                task=TASK,
                sequences=(sequence,),
                turns=(Turn(8, advantage, float(member)),),
                reward=float(member),
            )
        )
    return tuple(samples)


class Killed(BaseException):
    """Nothing of a process that is killed handles it, so this is no `Exception`."""


class Knife:
    """Kills the next trainer that saves, in the middle of it."""

    def __init__(self) -> None:
        self.drawn = False

    def draw(self) -> None:
        self.drawn = True

    def cut(self) -> None:
        if self.drawn:
            self.drawn = False
            raise Killed


class CutSimTrainer(SimTrainer):
    """Dies after a `Save` was begun and before it ends."""

    def __init__(self, settings: Mapping[str, Any], wake: Callable[[], None], knife: Knife) -> None:
        super().__init__(settings, wake)
        self._knife = knife
        self._saving = False

    def post(self, commands: Sequence[WorkerCommand]) -> None:
        super().post(commands)
        self._saving = any(isinstance(command, Save) for command in commands)

    def advance(self, now: float) -> Advance:
        advance = super().advance(now)
        if self._saving:
            self._knife.cut()
        return advance


def cut(trainer: TrainerWorker, knife: Knife) -> TrainerWorker:
    """It dies after some files of a checkpoint were written. Reaches in: it has no fault of its own to offer."""

    def write(path: Path, data: bytes) -> None:
        if path.name == "optimizer.safetensors":
            knife.cut()
        write_file(path, data)

    assert trainer._checkpoints is not None
    trainer._checkpoints._write = write
    return trainer


def real_trainer(
    scratch: Path, kind: type[ReferenceTrainer] | type[TorchTrainer], bad_batch: tuple[TrainSample, ...], **options: Any
) -> TrainerHarness:
    store, knife = MemoryStore(), Knife()
    settings = {
        "model": MODEL,
        "store": store,
        "learning_rate": 1e-3,
        "bucket_bytes": 8192,
        "checkpoints": str(scratch / "checkpoints"),
        **options,
    }
    return TrainerHarness(
        build=lambda wake: cut(kind(worker_settings(kind, settings), wake), knife),
        store=store,
        batch=lambda number: batch(number, real=True),
        virtual=False,
        bad_batch=bad_batch,
        interrupt_save=knife.draw,
    )


def reference_trainer(scratch: Path) -> TrainerHarness:
    return real_trainer(scratch, ReferenceTrainer, batch(1, real=True, advantages=(math.nan, 1.0)))


def torch_trainer(scratch: Path) -> TrainerHarness:
    return real_trainer(scratch, TorchTrainer, batch(1, real=False), token_budget=20)


def unforgiving_trainer(scratch: Path) -> TrainerHarness:
    """The first step that is not finite stops it."""
    bad = batch(1, real=True, advantages=(math.nan, 1.0))
    return real_trainer(scratch, TorchTrainer, bad, max_skipped=1, dtype="bfloat16")


def ranked_trainer(scratch: Path) -> TrainerHarness:
    """Two processes; a test that uses it makes them start quickly."""
    return real_trainer(scratch, TorchTrainer, batch(1, real=False), token_budget=20, ranks=2)


def adapted_trainer(scratch: Path) -> TrainerHarness:
    """With versions that are merged: those of an adapter cannot be compared by digest over a restart."""
    pytest.importorskip("peft", reason="LoRA needs peft: pip install 'rollart[lora]'")
    lora = {"rank": 4, "publish": "merged"}
    return real_trainer(scratch, TorchTrainer, batch(1, real=False), token_budget=20, lora=lora)


def critical_trainer(scratch: Path) -> TrainerHarness:
    """Several steps per claim, with a critic."""
    bad = batch(1, real=False)
    return real_trainer(scratch, TorchTrainer, bad, epochs=2, minibatches=2, critic={"value_learning_rate": 1e-2})


def simulated_trainer(scratch: Path) -> TrainerHarness:  # noqa: ARG001 - it writes nothing down
    store, knife = SimStore(), Knife()
    settings = {
        "hardware": WIDE,
        "model": TINY,
        "ranks": 1,
        "store": store,
        "push_gb_s": 1.0,
        "checkpoints": SimCheckpoints(),
    }
    return TrainerHarness(
        build=lambda wake: CutSimTrainer(settings, wake, knife),
        store=store,
        batch=lambda number: batch(number, real=False),
        virtual=True,
        interrupt_save=knife.draw,
    )


TRAINERS: dict[str, Callable[[Path], TrainerHarness]] = {
    "sim": simulated_trainer,
    "reference": reference_trainer,
    "torch": torch_trainer,
    "torch-bfloat16": unforgiving_trainer,
    "torch-2-ranks": ranked_trainer,
    "torch-lora": adapted_trainer,
    "torch-critic": critical_trainer,
}
