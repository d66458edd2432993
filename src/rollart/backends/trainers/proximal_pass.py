"""The pass over a claim before its first update, for values that later steps can no longer compute.

    rows ──► log-probabilities: the proximal policy ──► mismatch with what the engines reported
         └─► values ──► advantages and returns, where there is a critic

Runs without gradient, once per claim, over all its trajectories, in the micro-batches of its steps. A rank computes its
own rows; since a trajectory is on one rank, so does the critic's credit, except for totals over the batch.
"""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rollart.algo.correction import mismatch
from rollart.algo.metrics import Metrics
from rollart.backends.trainers.claims import Claim, Step
from rollart.backends.trainers.critic import Critic
from rollart.backends.trainers.packed_model import PackedModel
from rollart.backends.trainers.packing import Item
from rollart.backends.trainers.rank_partition import Part, filler_batch, parts_of
from rollart.backends.trainers.sharding import over_ranks


class _Known(NamedTuple):
    """Log-probabilities and values of one row's action tokens."""

    logprobs: NDArray[np.float32]
    values: NDArray[np.float32]


def proximal_pass(
    packed: PackedModel, critic: Critic | None, claim: Claim, steps: Sequence[Step], token_budget: int, ranks: int
) -> tuple[Claim, dict[str, float]]:
    """The claim with the new fields of its rows, and metrics of the whole batch."""
    of_left = parts_of([claim.left], token_budget, ranks)
    parts = [*chain.from_iterable((step.moving, step.still) for step in steps), *of_left]
    # Packing reorders rows but does not copy them.
    known = {id(item): each for item, each in _computed(packed, critic, parts)}
    ready = [[row._replace(proximal=known[id(row)].logprobs) for row in rows] for rows in claim.rows]
    rows = [row for each in claim.rows for row in each]
    metrics = over_ranks(_mismatch(rows, [known[id(row)].logprobs for row in rows]), ranks).summary()
    if critic is not None:
        left_at = {item.trajectory: float(known[id(item)].values[0]) for item in claim.left}
        values = [known[id(row)].values for row in rows]
        credited, quality = critic.credited(claim.rewards, [row for each in ready for row in each], values, left_at)
        metrics |= quality
        remaining = iter(credited)
        ready = [[next(remaining) for _ in each] for each in ready]
    return claim._replace(rows=ready), metrics


def _computed(packed: PackedModel, critic: Critic | None, parts: Iterable[Part]) -> list[tuple[Item, _Known]]:
    found = []
    with torch.no_grad():
        for part in parts:
            for batch in part.own:
                scores = packed.scores(batch, hidden=critic is not None)
                logprobs = scores.logprobs
                none = torch.zeros_like(logprobs)
                values = none if critic is None or scores.hidden is None else critic.values(scores.hidden)
                sizes = [item.targets.size for item in batch.items]
                cuts = (torch.split(tensor.cpu(), sizes) for tensor in (logprobs, values))
                for item, *each in zip(batch.items, *cuts, strict=True):
                    found.append((item, _Known(*(tensor.numpy() for tensor in each))))
            for _ in range(part.fillers):
                packed.scores(filler_batch())
    return found


def _mismatch(rows: Sequence[Item], logprobs: Sequence[NDArray[np.float32]]) -> Metrics:
    if not rows:
        return Metrics()
    proximal = torch.from_numpy(np.concatenate(logprobs))
    behaviour = torch.from_numpy(np.concatenate([row.behaviour for row in rows]))
    return Metrics({"tokens": torch.tensor(float(proximal.numel()))}) + mismatch(proximal, behaviour)
