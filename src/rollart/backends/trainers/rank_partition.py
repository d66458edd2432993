"""Micro-batches of a rank's own rows, with the facts on which all ranks must agree.

A rank knows only its share of a batch. Ranks exchange a few numbers per mini-batch: totals, which losses are divided
by, and numbers of passes, since ranks synchronise in every layer of every pass.

Invariants:
- Every row of a rank is in exactly one of its micro-batches, within the token budget.
- All ranks make the same number of passes; a rank without micro-batches left computes a filler, whose loss counts zero.
- Within its passes a rank's micro-batches have nearly equal sizes, so that no rank waits long for another.

Functions that take `ranks` are collective.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rollart.backends.trainers.packing import Item, MicroBatch, Tree, micro_batches
from rollart.backends.trainers.sharding import of_each_rank
from rollart.types.ids import TrajectoryId


class Part(NamedTuple):
    """Rows that are computed alike: with a gradient, or without."""

    own: list[MicroBatch]
    """Micro-batches of this rank."""
    passes: int
    """Passes that every rank makes."""
    batches: int
    """Micro-batches of all ranks."""
    tokens: int
    """Tokens fed by all ranks, fillers aside."""

    @property
    def fillers(self) -> int:
        return self.passes - len(self.own)


def parts_of(rows: Sequence[Sequence[Item]], token_budget: int, ranks: int) -> list[Part]:
    """Pack several lists of this rank's rows; all ranks have equally many lists."""
    cuts = [micro_batches(each, token_budget) for each in rows]
    passes = [max(counts) for counts in zip(*of_each_rank([len(cut) for cut in cuts], ranks), strict=True)]
    if ranks > 1:
        cuts = [_balanced(*each, token_budget) for each in zip(rows, cuts, passes, strict=True)]
    sizes = of_each_rank([(len(cut), _tokens(cut)) for cut in cuts], ranks)
    totals = [[sum(each) for each in zip(*of_part, strict=True)] for of_part in zip(*sizes, strict=True)]
    return [
        Part(cut, number, *(int(each) for each in total))
        for cut, number, total in zip(cuts, passes, totals, strict=True)
    ]


def filler_batch() -> MicroBatch:
    """The cheapest micro-batch, for a rank that has none left but must take part in the pass."""
    one, index = np.zeros(1, dtype=np.int32), np.zeros(1, dtype=np.int64)
    number = np.zeros(1, dtype=np.float32)
    item = Item(TrajectoryId(-1), one, index, one, number, index, number, proximal=number, returns=number)
    return MicroBatch((Tree((item,), (0,)),))


def _balanced(rows: Sequence[Item], cut: list[MicroBatch], most: int, token_budget: int) -> list[MicroBatch]:
    """Micro-batches for approximately the smallest budget that gives at most `most` of them."""
    if not cut:
        return cut
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
