"""Partition of micro-batches over ranks: nothing is lost, budgets are kept, and ranks are balanced."""

import numpy as np
import pytest
from packed_parts import samples
from parts import VOCABULARY

from rollart.backends.trainers.packing import Item, items, micro_batches
from rollart.backends.trainers.rank_partition import filler_batch, partition


def rows(count, seed=0):
    """Rows of different lengths, some sharing a prompt."""
    rng = np.random.default_rng(seed)
    made, prompts = [], []
    for number in range(count):
        prompt = np.full(int(rng.integers(2, 30)), number // 3, dtype=np.int32)
        if number % 3:
            prompt = prompts[-1]
        prompts.append(prompt)
        rest = rng.integers(0, VOCABULARY, int(rng.integers(1, 60))).astype(np.int32)
        first = prompt.size - 1
        sources = np.arange(first, first + rest.size)
        numbers = np.zeros(rest.size, dtype=np.float32)
        (example,) = items(samples()[:1], VOCABULARY)
        made.append(
            example._replace(
                trajectory=number,
                fed=np.concatenate((prompt, rest[:-1])),
                sources=sources,
                targets=rest,
                behaviour=numbers,
            )
        )
    return made


def names(batches) -> list[int]:
    members: list[Item] = [item for batch in batches for item in batch.items]
    return sorted(item.trajectory for item in members)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [0, 1, 2, 7, 40])
@pytest.mark.parametrize("budget", [1, 100, 350, 10_000])
def test_every_sequence_is_dealt_once_within_the_budget(ranks, count, budget):
    own = rows(count)
    parts = partition(own, budget, ranks)
    assert len(parts.shards) == ranks
    assert names(parts.batches) == list(range(count))
    whole = micro_batches(own, budget)
    assert parts.passes == -(-len(whole) // ranks)  # no more than the budget asks for
    for batch in parts.batches:
        assert batch.tokens <= budget or len(batch.items) == 1
    assert partition(own, budget, ranks) == parts
    if ranks == 1:
        assert parts.shards == [whole]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("budget", [400, 100_000])
def test_ranks_have_nearly_the_same_to_do(ranks, budget):
    parts = partition(rows(90), budget, ranks)
    for number in range(parts.passes):
        sizes = [shard[number].tokens for shard in parts.shards]  # all have work, in every pass
        assert max(sizes) <= 1.25 * min(sizes)


def test_the_shortest_is_the_least_work():
    own = rows(20)
    (only,) = filler_batch(own).items
    assert only.fed.size == min(row.fed.size for row in own)
