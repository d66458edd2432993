"""Shares of a batch: what each rank of a trainer gets of it.

    batch ──► mini-batches (one optimiser step each) ──► with a gradient │ without ──► contiguous cuts, one per rank

Invariants:
- Every trainable sample is in exactly one share; masked samples and those without a sampled token are in none.
- A sample is never split, so all that a trajectory needs of its own (turns, rewards, values) is on one rank.
- The mini-batch of a sample depends on the batch alone, not on the number of ranks.
- Within a mini-batch ranks have nearly equal numbers of tokens, of samples with a gradient and of those without: their
  costs differ. Cuts are contiguous, so that groups, which share their prompts, mostly stay together.
"""

from collections.abc import Sequence

import msgspec

from rollart.types.trajectory import TrainSample


class Share(msgspec.Struct, frozen=True):
    """The samples of one rank, each with the number of its mini-batch."""

    samples: tuple[TrainSample, ...]
    batches: tuple[int, ...]
    """Number of the mini-batch of each sample."""
    minibatches: int
    """Number of mini-batches of the whole batch; some may have no sample in this share."""


def split(samples: Sequence[TrainSample], ranks: int, minibatches: int) -> list[Share]:
    """The share of each rank. Mini-batches are dealt round-robin, so that each sees every group and task; there are
    fewer if samples run out."""
    trained = [sample for sample in samples if _trainable(sample)]
    count = min(minibatches, len(trained))
    shares: list[list[tuple[TrainSample, int]]] = [[] for _ in range(ranks)]
    for batch in range(count):
        dealt = trained[batch::count]
        for kind in ([each for each in dealt if _moves(each)], [each for each in dealt if not _moves(each)]):
            for sample, rank in zip(kind, _cuts([_tokens(each) for each in kind], ranks), strict=True):
                shares[rank].append((sample, batch))
    return [Share(tuple(each for each, _ in own), tuple(batch for _, batch in own), count) for own in shares]


def _cuts(sizes: Sequence[int], ranks: int) -> list[int]:
    """The rank of each item, for contiguous cuts of nearly equal size.

    >>> _cuts([4, 4, 4, 4, 8, 8], 2)
    [0, 0, 0, 0, 1, 1]
    """
    total, before, found = sum(sizes), 0, []
    for size in sizes:
        found.append((2 * before + size) * ranks // (2 * total))
        before += size
    return found


def _trainable(sample: TrainSample) -> bool:
    return not sample.masked and any(sequence.sampled for sequence in sample.sequences)


def _moves(sample: TrainSample) -> bool:
    return any(turn.advantage for turn in sample.turns)


def _tokens(sample: TrainSample) -> int:
    return sum(sequence.length for sequence in sample.sequences)
