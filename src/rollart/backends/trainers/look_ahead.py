"""The pass over a claim before the first update on it: what later steps can no longer find out.

    rows ──► log-probabilities: the proximal policy ──► mismatch with what the engines reported
         └─► values ──► advantages and returns, where there is a critic

Without a gradient, once per claim, over all its trajectories, whatever mini-batches they are dealt to afterwards.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rollart.algo.correction import mismatch
from rollart.algo.metrics import Metrics
from rollart.backends.trainers.critic import Critic
from rollart.backends.trainers.dealing import deal, shortest
from rollart.backends.trainers.packed_model import PackedModel
from rollart.backends.trainers.packing import Item, items, last_state
from rollart.backends.trainers.sharding import gathered
from rollart.types.ids import TrajectoryId
from rollart.types.trajectory import TrainSample


class _Known(NamedTuple):
    """Of one row: what the weights say about each of its action tokens."""

    logprobs: NDArray[np.float32]
    values: NDArray[np.float32]


class Claim(NamedTuple):
    """What a trainer needs to know of the samples of a claim: plain data, which all ranks get."""

    rows: list[Item]
    left: list[Item]
    """The last states of trajectories that were cut off, where there is a critic."""
    rewards: dict[TrajectoryId, list[float]]
    """Of the turns, where there is a critic."""


def claim_of(samples: Sequence[TrainSample], vocabulary: int, *, critic: bool) -> Claim:
    """Raises `Untrainable` with the trajectory that cannot be trained."""
    rows = items(samples, vocabulary)
    if not critic:
        return Claim(rows, [], {})
    left = [
        last_state(sample, vocabulary)
        for sample in samples
        if sample.truncated and not sample.masked and sample.sequences[-1].length
    ]
    return Claim(rows, left, {sample.trajectory: [turn.reward for turn in sample.turns] for sample in samples})


def look_ahead(
    packed: PackedModel, critic: Critic | None, claim: Claim, token_budget: int, ranks: int, rank: int
) -> tuple[list[Item], dict[str, float]]:
    """The rows with all that was found out, and what there is to report, on every rank. There must be rows."""
    rows, left = claim.rows, claim.left
    known = _known(packed, critic, [*rows, *left], token_budget, ranks, rank)
    known, of_left = known[: len(rows)], known[len(rows) :]
    ready = [row._replace(proximal=each.logprobs) for row, each in zip(rows, known, strict=True)]
    metrics = _mismatch(ready, known)
    if critic is not None:
        left_at = {item.trajectory: float(each.values[0]) for item, each in zip(left, of_left, strict=True)}
        ready, quality = critic.credited(claim.rewards, ready, [each.values for each in known], left_at)
        metrics |= quality
    return ready, metrics


def _known(
    packed: PackedModel, critic: Critic | None, rows: Sequence[Item], token_budget: int, ranks: int, rank: int
) -> list[_Known]:
    """What each rank finds out about its share is told to all."""
    dealt = deal(rows, token_budget, ranks)
    hand = dealt.hands[rank]
    places = {id(row): place for place, row in enumerate(rows)}  # packing changes their order, but makes no new ones
    known: dict[int, _Known] = {}
    with torch.no_grad():
        for batch in hand:
            scores = packed.scores(batch, hidden=critic is not None)
            logprobs = scores.logprobs
            none = torch.zeros_like(logprobs)
            values = none if critic is None or scores.hidden is None else critic.values(scores.hidden)
            sizes = [item.targets.size for item in batch.items]
            cuts = (torch.split(tensor.cpu(), sizes) for tensor in (logprobs, values))
            for item, *each in zip(batch.items, *cuts, strict=True):
                known[places[id(item)]] = _Known(*(tensor.numpy() for tensor in each))
        for _ in range(dealt.passes - len(hand)):
            packed.scores(shortest(rows))
    if ranks > 1:
        known = gathered(known)
    return [known[place] for place in range(len(rows))]


def _mismatch(rows: Sequence[Item], known: Sequence[_Known]) -> dict[str, float]:
    proximal = torch.from_numpy(np.concatenate([each.logprobs for each in known]))
    behaviour = torch.from_numpy(np.concatenate([row.behaviour for row in rows]))
    tokens = Metrics({"tokens": torch.tensor(float(proximal.numel()))})
    return (tokens + mismatch(proximal, behaviour)).summary()
