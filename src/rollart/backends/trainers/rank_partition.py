"""Partition of micro-batches over ranks, which compute them in parallel.

Invariants:
- Every sequence is in exactly one rank's shard, in a micro-batch within the token budget.
- No shard has more than `passes` micro-batches, and their sizes are balanced: ranks synchronise in every layer, so the
  budget is lowered until nearly all ranks have work of nearly equal size in every pass.
- The same sequences give the same shards on every rank.
"""

from collections.abc import Sequence
from typing import NamedTuple

from rollart.backends.trainers.packing import Item, MicroBatch, Tree, micro_batches


class Partition(NamedTuple):
    shards: list[list[MicroBatch]]
    """Micro-batches of every rank, the largest first."""

    @property
    def passes(self) -> int:
        """Passes that every rank makes; a rank without micro-batches left computes a filler."""
        return max(len(shard) for shard in self.shards)

    @property
    def batches(self) -> list[MicroBatch]:
        return [batch for shard in self.shards for batch in shard]


def partition(rows: Sequence[Item], token_budget: int, ranks: int) -> Partition:
    """Partition in as few passes as the budget allows."""
    cut = micro_batches(rows, token_budget)
    if ranks == 1 or not cut:
        return Partition([cut, *([] for _ in range(ranks - 1))])
    passes = -(-len(cut) // ranks)
    cut = _balanced(rows, cut, token_budget, passes * ranks)
    shards: list[list[MicroBatch]] = [[] for _ in range(ranks)]
    for batch in sorted(cut, key=lambda each: -each.tokens):
        free = [shard for shard in shards if len(shard) < passes]
        min(free, key=_tokens).append(batch)
    return Partition(shards)


def filler_batch(rows: Sequence[Item]) -> MicroBatch:
    """The cheapest micro-batch, for a rank that has none left but must take part in the pass."""
    return MicroBatch((Tree((min(rows, key=lambda each: each.fed.size),), (0,)),))


def _balanced(rows: Sequence[Item], cut: list[MicroBatch], token_budget: int, most: int) -> list[MicroBatch]:
    """Micro-batches for approximately the smallest budget that gives at most `most` of them."""
    total = _tokens(cut)
    low, high = total // most, min(token_budget, total)
    while high - low > high // 32:  # a closer search is not worth another packing
        budget = (low + high) // 2
        finer = micro_batches(rows, budget)
        if len(finer) <= most:
            cut, high = finer, budget
        else:
            low = budget + 1
    return cut


def _tokens(batches: Sequence[MicroBatch]) -> int:
    return sum(batch.tokens for batch in batches)
