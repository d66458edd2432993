"""Cold start: supervised training of a fresh model on transcripts, before reinforcement learning.

    transcripts ──► packed rows ──► log-probabilities of trained tokens ──► Muon, AdamW ──► a checkpoint folder

Reinforcement learning needs a policy that sometimes succeeds; random weights never do. A cold start teaches the model
the format of the tasks and a mediocre way of solving them. Observations between two answers are trained on too, with a
lower weight: they follow from the context, and a model that predicts them learns to copy and count sooner.

Invariants:
- A prompt is never trained on.
- The same settings and transcripts give the same weights.
- The folder is complete or absent, and engines, trainers and `from_pretrained` load it as it is.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field

from rollart.backends.models import build_model
from rollart.backends.trainers.checkpoint import write_folder
from rollart.backends.trainers.muon import Muon
from rollart.backends.trainers.packed_model import PackedModel
from rollart.backends.trainers.packing import Item, items, micro_batches
from rollart.backends.trainers.training_state import model_files, whole_model
from rollart.config.base import Strict
from rollart.config.training import Schedule
from rollart.types.errors import RequestError
from rollart.types.ids import GroupId, TrajectoryId
from rollart.types.tokens import LOGPROB, Generated, Segment, TokenSequence, VersionRun
from rollart.types.trajectory import TrainSample, Turn
from rollart.types.versions import Version

REPORTED_STEPS = 100

Turns = Sequence[tuple[Sequence[int], Sequence[int]]]
"""A transcript in tokens: pairs of observation and answer."""


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
    model = build_model(settings.model, dtype="float32", device=settings.device, seed=settings.seed)
    with _several_threads():
        loss = _train(settings, PackedModel(model), transcripts, report)
    layout = whole_model(model)
    write_folder(folder, model_files(layout, beside, layout.tensors))
    return loss


@contextmanager
def _several_threads() -> Iterator[None]:
    """Use up to 4 threads: nothing else runs during a cold start, and a small model gains nothing from more."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(4, os.cpu_count() or 1))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _train(settings: ColdStartSettings, packed: PackedModel, transcripts: Sequence[Turns], report: Report) -> float:
    weight = settings.observation_weight
    rows = items([_sample(number, turns, weight) for number, turns in enumerate(transcripts)], packed.vocabulary)
    if not rows:
        raise RequestError("a cold start needs transcripts with answers; there are none")
    parameters = dict(packed.model.named_parameters())
    matrices = {name: value for name, value in parameters.items() if ".layers." in name and value.ndim == 2}
    muon = Muon(matrices.values())
    others = [value for name, value in parameters.items() if name not in matrices]
    adam = torch.optim.AdamW(others, lr=settings.learning_rate, betas=(0.9, 0.98), fused=True)
    schedule = Schedule(kind="cosine", warmup_steps=settings.steps // 20, total_steps=settings.steps, final_share=0.05)
    chance = np.random.default_rng(settings.seed)
    waiting: list[int] = []
    learned = 0.0
    for step in range(settings.steps):
        chosen: list[Item] = []
        tokens = 0
        while not chosen or tokens < settings.batch_tokens:
            waiting = waiting or chance.permutation(len(rows)).tolist()
            chosen.append(rows[waiting.pop()])
            tokens += chosen[-1].fed.size
        (batch,) = micro_batches(chosen, tokens)
        weights = torch.from_numpy(np.concatenate([item.advantages for item in batch.items])).to(settings.device)
        loss = -(packed.scores(batch).logprobs * weights).sum() / weights.sum()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        share = schedule.share(step)
        for group in adam.param_groups:
            group["lr"] = settings.learning_rate * share
        adam.step()
        muon.step(settings.matrix_rate * share)
        packed.model.zero_grad(set_to_none=True)
        learned = float(loss.detach())
        if (step + 1) % REPORTED_STEPS == 0:
            report(step + 1, learned)
    return learned


def _sample(number: int, turns: Turns, observation_weight: float) -> TrainSample:
    """Tokens are weighted by the advantage of their turn; trained observations are turns of their own."""
    log = TokenSequence()
    learned: list[Turn] = []
    for observed, answered in turns:
        if log.length and observation_weight:
            learned.append(_learn(log, observed, observation_weight))
        else:
            log.append_context(Segment.of(list(observed)))
        learned.append(_learn(log, answered, 1.0))
    return TrainSample(TrajectoryId(number), GroupId(0), "cold start", (log,), tuple(learned), reward=0.0)


def _learn(log: TokenSequence, tokens: Sequence[int], weight: float) -> Turn:
    nothing = np.zeros(len(tokens), dtype=LOGPROB).tobytes()
    log.append_sampled(Generated(Segment.of(list(tokens)), nothing, (VersionRun(Version(0, 0), len(tokens)),)))
    return Turn(len(tokens), advantage=weight)
