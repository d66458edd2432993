"""The pass over a claim before its first update, for values that later steps can no longer compute.

    rows ──► log-probabilities: the proximal policy ──► mismatch with what the engines reported
         └─► values ──► advantages and returns, where there is a critic

Runs without gradient, once per claim, over all its trajectories, however they are split into mini-batches later.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rollart.algo.correction import mismatch
from rollart.algo.metrics import Metrics
from rollart.backends.trainers.critic import Critic
from rollart.backends.trainers.packed_model import PackedModel
from rollart.backends.trainers.packing import Item, items, last_state
from rollart.backends.trainers.rank_partition import filler_batch, partition
from rollart.backends.trainers.sharding import gathered
from rollart.types.ids import TrajectoryId
from rollart.types.trajectory import TrainSample


class _Known(NamedTuple):
    """Log-probabilities and values of one row's action tokens."""

    logprobs: NDArray[np.float32]
    values: NDArray[np.float32]


class Claim(NamedTuple):
    """A claim as plain data, sent to all ranks."""

    rows: list[Item]
    left: list[Item]
    """Last states of truncated trajectories; empty without a critic."""
    rewards: dict[TrajectoryId, list[float]]
    """Rewards per turn; empty without a critic."""


def claim_of(samples: Sequence[TrainSample], vocabulary: int, *, critic: bool) -> Claim:
    """Build a claim; raises `Untrainable` naming the offending trajectory."""
    rows = items(samples, vocabulary)
    if not critic:
        return Claim(rows, [], {})
    left = [
        last_state(sample, vocabulary)
        for sample in samples
        if sample.truncated and not sample.masked and sample.sequences[-1].length
    ]
    return Claim(rows, left, {sample.trajectory: [turn.reward for turn in sample.turns] for sample in samples})


def proximal_pass(
    packed: PackedModel, critic: Critic | None, claim: Claim, token_budget: int, ranks: int, rank: int
) -> tuple[list[Item], dict[str, float]]:
    """The rows with their new fields, and metrics, on every rank. `claim.rows` must not be empty."""
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
    """Each rank computes its shard; the results are gathered on all ranks."""
    parts = partition(rows, token_budget, ranks)
    shard = parts.shards[rank]
    places = {id(row): place for place, row in enumerate(rows)}  # packing reorders rows but does not copy them
    known: dict[int, _Known] = {}
    with torch.no_grad():
        for batch in shard:
            scores = packed.scores(batch, hidden=critic is not None)
            logprobs = scores.logprobs
            none = torch.zeros_like(logprobs)
            values = none if critic is None or scores.hidden is None else critic.values(scores.hidden)
            sizes = [item.targets.size for item in batch.items]
            cuts = (torch.split(tensor.cpu(), sizes) for tensor in (logprobs, values))
            for item, *each in zip(batch.items, *cuts, strict=True):
                known[places[id(item)]] = _Known(*(tensor.numpy() for tensor in each))
        for _ in range(parts.passes - len(shard)):
            packed.scores(filler_batch(rows))
    if ranks > 1:
        known = gathered(known)
    return [known[place] for place in range(len(rows))]


def _mismatch(rows: Sequence[Item], known: Sequence[_Known]) -> dict[str, float]:
    proximal = torch.from_numpy(np.concatenate([each.logprobs for each in known]))
    behaviour = torch.from_numpy(np.concatenate([row.behaviour for row in rows]))
    tokens = Metrics({"tokens": torch.tensor(float(proximal.numel()))})
    return (tokens + mismatch(proximal, behaviour)).summary()
