"""Cold start: supervised training of a fresh model on transcripts, before reinforcement learning.

    transcripts ──► supervised training (`supervised`), Muon for the layers' matrices ──► a checkpoint folder

Reinforcement learning needs a policy that sometimes succeeds; random weights never do. A cold start teaches the model
the format of the tasks and a mediocre way of solving them. Observations between two answers are trained on too, with a
lower weight: they follow from the context, and a model that predicts them learns to copy and count sooner.

Invariants:
- The same settings and transcripts give the same weights.
- The folder is complete or absent, and engines, trainers and `from_pretrained` load it as it is.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from rollart.backends.trainers.checkpoint import write_folder
from rollart.backends.trainers.supervised import Plan, Progress, SupervisedTrainer, Turns, sample, train
from rollart.backends.trainers.training_state import model_files, whole_model
from rollart.config.base import Strict
from rollart.config.training import Schedule, TrainerSettings
from rollart.types.errors import RequestError

REPORTED_STEPS = 100
WHOLE_BATCH = 2**24
"""Token budget that keeps every batch in one pass."""


class ColdStartSettings(Strict):
    model: dict[str, Any]
    """`{"config": {…}}`: the architecture; weights are initialised from `seed`."""
    seed: int = 0
    steps: int = Field(default=350, ge=1)
    batch_tokens: int = Field(default=960, ge=1)
    """Tokens per step."""
    learning_rate: float = Field(default=3e-3, gt=0)
    """AdamW's rate, for embeddings and norms."""
    matrix_rate: float = Field(default=0.02, gt=0)
    """Muon's rate, for the layers' matrices."""
    observation_weight: float = Field(default=0.1, ge=0, le=1)
    """Weight of an observation token, after the first observation; answer tokens weigh 1."""
    device: str = "cpu"

    def trainer(self) -> TrainerSettings:
        return TrainerSettings(
            learning_rate=self.learning_rate,
            weight_decay=0.01,
            betas=(0.9, 0.98),
            schedule=Schedule(kind="cosine", warmup_steps=self.steps // 20, total_steps=self.steps, final_share=0.05),
            token_budget=WHOLE_BATCH,
            device=self.device,
        )


Report = Callable[[int, float], None]
"""Progress callback: called every `REPORTED_STEPS` steps with their number and the loss."""


def silent(steps: int, loss: float) -> None:
    pass


def cold_start(
    settings: ColdStartSettings,
    transcripts: Sequence[Turns],
    folder: Path,
    beside: Mapping[str, bytes],
    report: Report = silent,
) -> float:
    """Train a fresh model and write it to `folder`, with the files `beside` its weights. Returns the last loss."""
    if folder.exists():
        raise RequestError(f"{folder} already exists and is not overwritten; choose a new folder")
    samples = [sample(number, [turns], settings.observation_weight) for number, turns in enumerate(transcripts)]
    trainer = SupervisedTrainer(
        {"model": settings.model, "seed": settings.seed, "trainer": settings.trainer()},
        matrix_rate=settings.matrix_rate,
    )

    def some(progress: Progress) -> None:
        if progress.step % REPORTED_STEPS == 0:
            report(progress.step, progress.loss)

    try:
        plan = Plan(settings.steps, settings.batch_tokens, settings.seed)
        loss = train(trainer, plan, samples, (), some)
        layout = whole_model(trainer.model)
        write_folder(folder, model_files(layout, beside, layout.tensors))
    finally:
        trainer.close()
    return loss
