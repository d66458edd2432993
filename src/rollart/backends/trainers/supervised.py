"""Supervised training on transcripts: the torch trainer with a weighted log-likelihood as its loss.

    transcripts in tokens ──► samples, weighted per turn ──► batches of whole samples ──► TorchTrainer: one claim each
                                                                                              └──► checkpoints

Rows, micro-batches, LoRA, clipping, skipped steps and checkpoints are those of reinforcement learning, so what was
trained here is what `rollart train` starts from.

Invariants:
- A prompt (the first observation of a sequence) is never trained on.
- The same settings and transcripts give the same weights, in one go or resumed from a checkpoint.
- The loss is the mean over the tokens of a batch, each with its weight, however the batch is split.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from rollart.algo.metrics import Metrics
from rollart.backends.stores.memory import MemoryStore
from rollart.backends.trainers.claims import Step
from rollart.backends.trainers.muon import Muon
from rollart.backends.trainers.packing import Item, MicroBatch, items, micro_batches
from rollart.backends.trainers.torch_trainer import TorchTrainer, Update
from rollart.config.training import TrainerSettings
from rollart.types.errors import RequestError, TrainingFailed
from rollart.types.ids import ClaimId, GroupId, TrajectoryId
from rollart.types.messages import Save, Saved, Train, Trained, WorkerCommand
from rollart.types.tokens import LOGPROB, Generated, Segment, TokenSequence, VersionRun
from rollart.types.trajectory import TrainSample, Turn
from rollart.types.versions import Version

AnsweredTurn = tuple[Sequence[int], Sequence[int]]
"""Tokens of an observation, and of the answer to it."""
Turns = Sequence[AnsweredTurn]
"""One sequence: a transcript, or a part of one that began with a new context."""


class Progress(NamedTuple):
    """One step."""

    step: int
    steps: int
    loss: float
    """Weighted mean of -log p over the tokens of its batch."""
    held_out: float | None = None
    """The same over the answers of the held-out transcripts, if it was measured after this step."""


Report = Callable[[Progress], None]


class Plan(NamedTuple):
    """What a supervised training does."""

    steps: int
    batch_tokens: int
    seed: int
    eval_every: int = 1
    checkpoint_every: int = 0
    """0: only the last step is saved."""


def sample(number: int, sequences: Sequence[Turns], observation_weight: float) -> TrainSample:
    """A transcript as a sample. Tokens are weighted by the advantage of their turn; trained observations are turns of
    their own."""
    logs: list[TokenSequence] = []
    learned: list[Turn] = []
    for turns in sequences:
        log = TokenSequence()
        for observed, answered in turns:
            if log.length and observation_weight:
                learned.append(_learn(log, observed, observation_weight))
            else:
                log.append_context(Segment.of(list(observed)))
            learned.append(_learn(log, answered, 1.0))
        logs.append(log)
    return TrainSample(TrajectoryId(number), GroupId(0), "demonstrations", tuple(logs), tuple(learned), reward=0.0)


def _learn(log: TokenSequence, tokens: Sequence[int], weight: float) -> Turn:
    nothing = np.zeros(len(tokens), dtype=LOGPROB).tobytes()
    log.append_sampled(Generated(Segment.of(list(tokens)), nothing, (VersionRun(Version(0, 0), len(tokens)),)))
    return Turn(len(tokens), advantage=weight)


class SupervisedTrainer(TorchTrainer):
    """A torch trainer whose loss is the weighted log-likelihood of the samples' tokens; advantages are weights.

    With `matrix_rate`, matrices of the layers are trained by Muon and the rest by AdamW: for small models from scratch,
    without checkpoints.
    """

    def __init__(self, settings: Mapping[str, Any], *, matrix_rate: float = 0.0) -> None:
        trainer = settings["trainer"]
        if isinstance(trainer, TrainerSettings) and trainer.ranks > 1:
            raise RequestError(f"supervised training has one rank, not {trainer.ranks}: set trainer.ranks = 1 for it")
        self._matrix_rate = matrix_rate
        self._muon: Muon | None = None
        self._total = 1.0
        super().__init__({"store": MemoryStore(), **settings}, lambda: None)

    @property
    def done(self) -> int:
        """Steps made so far, those before a resume included."""
        return 0 if self._version is None else self._version.step

    @property
    def saves(self) -> bool:
        """Whether it has a place for checkpoints."""
        return self._checkpoints is not None

    @property
    def model(self) -> Any:
        return self._packed.model

    def rows(self, one: TrainSample) -> list[Item]:
        return items([one], self._packed.vocabulary)

    @torch.no_grad()
    def mean_loss(self, rows: Sequence[Item]) -> float:
        """Mean of -log p over all answer tokens of these rows."""
        found = weighed = 0.0
        for batch in micro_batches(rows, self._settings.trainer.token_budget):
            weights = _weights(batch)
            answers = (weights == 1).to(self.model.device)
            found -= float((self._packed.scores(batch).logprobs * answers).sum())
            weighed += float(answers.sum())
        return found / weighed

    def _optimizer_of(self, parameters: Mapping[str, torch.nn.Parameter]) -> torch.optim.Optimizer:
        if not self._matrix_rate:
            return super()._optimizer_of(parameters)
        matrices = {name: value for name, value in parameters.items() if ".layers." in name and value.ndim == 2}
        self._muon = Muon(matrices.values())
        return super()._optimizer_of({name: value for name, value in parameters.items() if name not in matrices})

    def _update(self, train: Train, step: Step, share: float) -> Update:
        self._total = sum(float(_weights(batch).sum()) for batch in step.moving.own)
        return super()._update(train, step, share)

    def _loss(self, batch: MicroBatch, step: Step) -> tuple[torch.Tensor, Metrics]:
        logprobs = self._packed.scores(batch).logprobs
        loss = -(logprobs * _weights(batch).to(logprobs.device)).sum() / self._total
        tokens = loss.new_tensor(float(step.totals.tokens))
        return loss, Metrics({"loss": loss.detach(), "tokens": tokens})

    def _clear(self) -> None:
        self._packed.model.zero_grad(set_to_none=True)

    def _apply(self, share: float) -> None:
        super()._apply(share)
        if self._muon is not None:
            self._muon.step(self._matrix_rate * share)

    def ask(self, command: WorkerCommand) -> Any:
        """The answer to one command."""
        self.post([command])
        events: list[Any] = []
        while not events:
            events += self.advance(0.0).events
        return events[0]


def train(
    trainer: SupervisedTrainer,
    plan: Plan,
    samples: Sequence[TrainSample],
    held_out: Sequence[TrainSample],
    report: Report,
) -> float:
    """Train from the last checkpoint to the last step of the plan; returns the last loss."""
    kept = [each for each in samples if trainer.rows(each)]
    if not kept:
        raise RequestError("supervised training needs transcripts with answers; there are none")
    watched = [row for each in held_out for row in trainer.rows(each)]
    sizes = [fed_tokens(trainer.rows(each)) for each in kept]
    learned = 0.0
    with several_threads():
        for step, chosen in zip(range(1, plan.steps + 1), batches(sizes, plan.batch_tokens, plan.seed), strict=False):
            if step <= trainer.done:
                continue
            learned = _step(trainer, step, [kept[each] for each in chosen])
            last = step == plan.steps
            due = watched and (last or step % plan.eval_every == 0)
            report(Progress(step, plan.steps, learned, trainer.mean_loss(watched) if due else None))
            if last or (plan.checkpoint_every and step % plan.checkpoint_every == 0):
                _save(trainer, step)
    return learned


def fed_tokens(rows: Sequence[Item]) -> int:
    """Tokens that a sample feeds to the model."""
    return sum(row.fed.size for row in rows)


def batches(sizes: Sequence[int], batch_tokens: int, seed: int) -> Iterator[list[int]]:
    """Indices of the samples of each step, without end: every pass has another order, and each sample once."""
    chance = np.random.default_rng(seed)
    waiting: list[int] = []
    while True:
        chosen: list[int] = []
        tokens = 0
        while not chosen or tokens < batch_tokens:
            waiting = waiting or chance.permutation(len(sizes)).tolist()
            chosen.append(waiting.pop())
            tokens += sizes[chosen[-1]]
        yield chosen


def steps_of_epochs(epochs: int, sizes: Sequence[int], batch_tokens: int, seed: int) -> int:
    """Number of steps until every sample was trained on as often as there are epochs.

    >>> steps_of_epochs(2, [10, 10, 10], batch_tokens=20, seed=0)
    3
    """
    steps, left = 0, epochs * len(sizes)
    for chosen in batches(sizes, batch_tokens, seed):
        steps, left = steps + 1, left - len(chosen)
        if left <= 0:
            break
    return steps


def _step(trainer: SupervisedTrainer, step: int, chosen: Sequence[TrainSample]) -> float:
    answer = trainer.ask(Train(ClaimId(step), Version(0, step), tuple(chosen)))
    if not isinstance(answer, Trained):
        raise TrainingFailed(f"step {step}: {answer.reason}")
    return answer.metrics.get("loss", float("nan"))


def _save(trainer: SupervisedTrainer, step: int) -> None:
    if not trainer.saves:
        return
    answer = trainer.ask(Save(Version(0, step)))
    if not isinstance(answer, Saved):
        raise TrainingFailed(answer.reason)


def _weights(batch: MicroBatch) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([item.advantages for item in batch.items]))


@contextmanager
def several_threads() -> Iterator[None]:
    """Use up to 4 threads: nothing else runs during supervised training, and a small model gains nothing from more."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(4, os.cpu_count() or 1))
    try:
        yield
    finally:
        torch.set_num_threads(before)
