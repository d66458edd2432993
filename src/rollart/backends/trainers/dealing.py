"""Micro-batches dealt to ranks, which compute them side by side.

What holds:
- every sequence is in exactly one rank's hand, in a micro-batch that keeps the token budget;
- no hand has more micro-batches than `passes`, and none is needlessly large: ranks wait for each other in every layer,
  so the cut is made finer until nearly all of them have work in every pass, of nearly the same size;
- the same sequences give the same hands on every rank.
"""

from collections.abc import Sequence
from typing import NamedTuple

from rollart.backends.trainers.packing import Item, MicroBatch, Tree, micro_batches


class Deal(NamedTuple):
    hands: list[list[MicroBatch]]
    """Of every rank, the largest first."""

    @property
    def passes(self) -> int:
        """What every rank has to make; who has nothing left makes an empty one."""
        return max(len(hand) for hand in self.hands)

    @property
    def batches(self) -> list[MicroBatch]:
        return [batch for hand in self.hands for batch in hand]


def deal(rows: Sequence[Item], token_budget: int, ranks: int) -> Deal:
    """In as few passes as the budget allows."""
    cut = micro_batches(rows, token_budget)
    if ranks == 1 or not cut:
        return Deal([cut, *([] for _ in range(ranks - 1))])
    passes = -(-len(cut) // ranks)
    cut = _even(rows, cut, token_budget, passes * ranks)
    hands: list[list[MicroBatch]] = [[] for _ in range(ranks)]
    for batch in sorted(cut, key=lambda each: -each.tokens):
        free = [hand for hand in hands if len(hand) < passes]
        min(free, key=_tokens).append(batch)
    return Deal(hands)


def shortest(rows: Sequence[Item]) -> MicroBatch:
    """The least that a rank can compute."""
    return MicroBatch((Tree((min(rows, key=lambda each: each.fed.size),), (0,)),))


def _even(rows: Sequence[Item], cut: list[MicroBatch], token_budget: int, most: int) -> list[MicroBatch]:
    """The cut by the smallest budget, nearly, that gives no more micro-batches than this."""
    total = _tokens(cut)
    low, high = total // most, min(token_budget, total)
    while high - low > high // 32:  # nearer is not worth another cut
        budget = (low + high) // 2
        finer = micro_batches(rows, budget)
        if len(finer) <= most:
            cut, high = finer, budget
        else:
            low = budget + 1
    return cut


def _tokens(batches: Sequence[MicroBatch]) -> int:
    return sum(batch.tokens for batch in batches)
