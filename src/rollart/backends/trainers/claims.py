"""A rank's share of a claim as rows, and the optimiser steps that it is trained in.

    Share ──► Claim: this rank's rows of every mini-batch ──► Steps: parts with and without a gradient, totals

Invariants:
- A share that cannot be trained is refused by all ranks, with the same reason and before any of them computes.
- Steps are those of the whole batch: totals and the choice of what has a gradient do not depend on the cut.
"""

from collections.abc import Sequence
from typing import NamedTuple

from rollart.backends.trainers.packing import Item, Untrainable, items, last_state
from rollart.backends.trainers.rank_partition import Part, parts_of
from rollart.backends.trainers.sharding import of_each_rank
from rollart.types.ids import TrajectoryId
from rollart.types.rank_shares import Share


class Totals(NamedTuple):
    """Totals of one mini-batch, over all ranks."""

    tokens: int
    """Action tokens."""
    sequences: int
    moving: int
    """Sequences with an advantage other than zero."""


class Claim(NamedTuple):
    """This rank's part of a claim."""

    rows: list[list[Item]]
    """By mini-batch."""
    left: list[Item]
    """Last states of truncated trajectories; empty without a critic."""
    rewards: dict[TrajectoryId, list[float]]
    """Rewards per turn; empty without a critic."""
    totals: list[Totals]
    """By mini-batch, over all ranks."""


class Step(NamedTuple):
    """One mini-batch: one optimiser step per epoch."""

    rows: list[Item]
    """Rows of this rank."""
    moving: Part
    still: Part
    """Rows with zero advantage, which are measured but skip the backward pass."""
    totals: Totals


def claim_of(share: Share, vocabulary: int, ranks: int, *, critic: bool) -> Claim:
    """Build this rank's claim. Collective; raises `Untrainable`, naming the offending trajectory, on all ranks."""
    refusal = ""
    rows: list[list[Item]] = [[] for _ in range(share.minibatches)]
    left: list[Item] = []
    try:
        for sample, batch in zip(share.samples, share.batches, strict=True):
            rows[batch] += items([sample], vocabulary)
            if critic and sample.truncated and sample.sequences[-1].length:
                left.append(last_state(sample, vocabulary))
    except Untrainable as error:
        refusal = str(error)
    found = of_each_rank((refusal, [_totals(each) for each in rows]), ranks)
    refusal = next((each for each, _ in found if each), "")
    if refusal:
        raise Untrainable(refusal)
    totals = [
        Totals(*map(sum, zip(*of_batch, strict=True))) for of_batch in zip(*(own for _, own in found), strict=True)
    ]
    rewards = {sample.trajectory: [turn.reward for turn in sample.turns] for sample in share.samples} if critic else {}
    used = [batch for batch, total in enumerate(totals) if total.sequences]
    return Claim([rows[batch] for batch in used], left, rewards, [totals[batch] for batch in used])


def steps_of(claim: Claim, token_budget: int, ranks: int, *, all_move: bool) -> list[Step]:
    """The steps of a claim. Collective. With `all_move` every row has a gradient, whatever its advantage."""
    lists: list[list[Item]] = []
    for rows, totals in zip(claim.rows, claim.totals, strict=True):
        # Without any advantage, keep a step of zero gradients: otherwise moments would not decay.
        every = all_move or not totals.moving
        lists.append([row for row in rows if every or row.advantages.any()])
        lists.append([row for row in rows if not (every or row.advantages.any())])
    parts = parts_of(lists, token_budget, ranks)
    return [Step(*each) for each in zip(claim.rows, parts[::2], parts[1::2], claim.totals, strict=True)]


def _totals(rows: Sequence[Item]) -> Totals:
    return Totals(sum(row.targets.size for row in rows), len(rows), sum(bool(row.advantages.any()) for row in rows))
