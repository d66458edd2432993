"""The two sides of `rollart bench train`: the torch trainer as a run uses it, and a straightforward padded loop.

Both make the same optimiser step on the same batch from the same weights, which is checked: their losses must agree.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from rollart.backends.models import build_model, token_logprobs
from rollart.backends.stores.memory import MemoryStore
from rollart.backends.trainers.torch_trainer import TorchTrainer
from rollart.bench.train import TrainBench
from rollart.config.training import TrainerSettings
from rollart.types.errors import RunError
from rollart.types.ids import ClaimId, GroupId, TrajectoryId
from rollart.types.messages import Train, Trained
from rollart.types.tokens import LOGPROB, Generated, Segment, TokenSequence, VersionRun
from rollart.types.trajectory import TrainSample, Turn
from rollart.types.versions import Version

PADDED_BATCH = 16
"""Sequences per micro-batch of the padded loop."""
LEARNING_RATE = 1e-4
CLIP = 0.2


def measure(bench: TrainBench, say: Callable[[str], None]) -> dict[str, float]:
    """CPU-seconds of both sides, alternating; the median counts."""
    samples = draw(bench.lengths, int(bench.config["vocab_size"]))
    packed, padded = Packed(bench.config), Padded(bench.config)
    for side in (packed, padded):
        side.step(samples[:2])
    times: dict[str, list[float]] = {"packed": [], "padded": []}
    for _ in range(bench.repeats):
        seconds, loss = timed(packed, samples)
        times["packed"].append(seconds)
        padded_seconds, padded_loss = timed(padded, samples)
        times["padded"].append(padded_seconds)
        say(f"  packed {seconds:.1f} s, padded {padded_seconds:.1f} s of CPU")
        if not math.isclose(loss, padded_loss, rel_tol=1e-2, abs_tol=1e-3):
            raise RunError(f"both sides make the same step, but their losses are {loss:g} and {padded_loss:g}")
    packed_s, padded_s = statistics.median(times["packed"]), statistics.median(times["padded"])
    return {
        "vs_padded": padded_s / packed_s,
        "tokens_per_cpu_s": sum(bench.lengths) / packed_s,
        "padded_tokens_per_cpu_s": sum(bench.lengths) / padded_s,
    }


def draw(lengths: Sequence[int], vocabulary: int) -> tuple[TrainSample, ...]:
    """Random tokens, of which the last third are actions; every second trajectory has a positive advantage."""
    rng = np.random.default_rng(0)
    behaviour = -math.log(vocabulary)
    out = []
    for number, length in enumerate(lengths):
        actions = max(1, length // 3)
        log = TokenSequence()
        log.append_context(Segment.of(rng.integers(0, vocabulary, length - actions, dtype=np.int32)))
        logprobs = np.full(actions, behaviour, dtype=LOGPROB).tobytes()
        sampled = Segment.of(rng.integers(0, vocabulary, actions, dtype=np.int32))
        log.append_sampled(Generated(sampled, logprobs, (VersionRun(Version(0, 0), actions),)))
        turn = Turn(actions, advantage=1.0 if number % 2 else -0.5)
        out.append(TrainSample(TrajectoryId(number), GroupId(number), "bench", (log,), (turn,), 0.0))
    return tuple(out)


class Packed:
    """The torch trainer, driven as in a run."""

    def __init__(self, config: dict[str, Any]) -> None:
        own = TrainerSettings(learning_rate=LEARNING_RATE)
        settings = {"model": {"config": config}, "store": MemoryStore(), "trainer": own}
        self._trainer = TorchTrainer(settings, lambda: None)
        self._steps = 0

    def step(self, samples: Sequence[TrainSample]) -> float:
        self._steps += 1
        self._trainer.post([Train(ClaimId(self._steps), Version(0, self._steps), tuple(samples))])
        (done,) = self._trainer.advance(0.0).events
        if not isinstance(done, Trained):
            raise RunError(f"the trainer refused the batch of the bench: {done}")
        return done.metrics["loss"]


class Padded:
    """A plain loop: pad to the longest, one forward and backward pass per micro-batch, loss on action tokens."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._model = build_model({"config": config}, dtype="float32", device="cpu")
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)

    def step(self, samples: Sequence[TrainSample]) -> float:
        total = sum(sequence.sampled for sample in samples for sequence in sample.sequences)
        loss = 0.0
        self._optimizer.zero_grad(set_to_none=True)
        for start in range(0, len(samples), PADDED_BATCH):
            part = self._loss(samples[start : start + PADDED_BATCH]) / total
            part.backward()  # type: ignore[no-untyped-call]
            loss += part.item()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        return loss

    def _loss(self, samples: Sequence[TrainSample]) -> torch.Tensor:
        logs = [sample.sequences[0] for sample in samples]
        shape = (len(logs), max(log.length for log in logs))
        tokens, there = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
        acted, behaviour = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape)
        for row, log in enumerate(logs):
            tokens[row, : log.length] = torch.from_numpy(log.whole().ids().astype(np.int64))
            there[row, : log.length] = 1
            acted[row, : log.length] = torch.from_numpy(log.action_mask())
            behaviour[row, : log.length] = torch.from_numpy(log.logprobs())
        logits = self._model(tokens, attention_mask=there, use_cache=False).logits[:, :-1]
        mask = acted[:, 1:]
        logprobs = token_logprobs(logits[mask], tokens[:, 1:][mask], 1.0)
        advantages = torch.tensor([sample.turns[0].advantage for sample in samples])[:, None].expand(mask.shape)[mask]
        ratio = torch.exp(logprobs - behaviour[:, 1:][mask])
        return -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).sum()


def timed(side: Packed | Padded, samples: Sequence[TrainSample]) -> tuple[float, float]:
    """CPU-seconds of one step, and its loss."""
    before = time.process_time()
    loss = side.step(samples)
    return time.process_time() - before, loss
