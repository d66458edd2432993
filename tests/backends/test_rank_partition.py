"""Micro-batches of a rank: nothing is lost, budgets are kept, and passes are balanced."""

import numpy as np
import pytest
from packed_parts import samples
from parts import VOCABULARY

from rollart.backends.trainers.packing import Item, items, micro_batches
from rollart.backends.trainers.rank_partition import _balanced, filler_batch, parts_of


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


@pytest.mark.parametrize("count", [0, 1, 2, 7, 40])
@pytest.mark.parametrize("budget", [1, 100, 350, 10_000])
def test_every_sequence_is_in_one_micro_batch_within_the_budget(count, budget):
    own = rows(count)
    part, nothing = parts_of([own, []], budget, ranks=1)
    assert names(part.own) == list(range(count))
    assert part.passes == part.batches == len(part.own)
    assert part.fillers == 0
    assert part.tokens == sum(batch.tokens for batch in part.own)
    for batch in part.own:
        assert batch.tokens <= budget or len(batch.items) == 1
    assert nothing == ([], 0, 0, 0)
    assert parts_of([own], budget, ranks=1) == [part]


@pytest.mark.parametrize("more", [0, 1, 5])
def test_passes_are_of_nearly_equal_size(more):
    """Other ranks may need more passes than this one."""
    own = rows(90)
    cut = micro_batches(own, 400)
    finer = _balanced(own, cut, len(cut) + more, 400)
    assert names(finer) == list(range(90))
    assert len(finer) <= len(cut) + more
    sizes = [batch.tokens for batch in finer]
    assert max(sizes) <= 1.25 * sum(sizes) / len(sizes)


def test_a_filler_is_the_least_work():
    (only,) = filler_batch().items
    assert only.fed.size == only.targets.size == 1
