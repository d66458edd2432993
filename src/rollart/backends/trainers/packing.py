"""Trajectories as rows of tokens without padding, split by a token budget.

    samples of a mini-batch ──► Item (one sequence: what is fed, what is predicted)
    a mini-batch ──► Tree (sequences with a shared prefix) ──► MicroBatch (one forward and backward pass)

    a micro-batch    | A 0 … 9 | A1 7 … 12 | A2 7 … 9 | B 0 … 5 | …      one row, no padding

Invariants:
- Every action token with a predecessor is in exactly one micro-batch; a sequence is never split.
- A micro-batch has at most `token_budget` tokens, unless it is a single longer sequence.
- Sequences share common prefixes: a group's prompt, a task's instructions, identical first turns, the rest of a
  truncated context. Each is stored once per micro-batch.
- Tokens after the last action of a sequence predict nothing and are dropped.
- Masked samples are absent: their only effect, on the group's baseline, is already in the others' advantages.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from rollart.types.ids import TrajectoryId
from rollart.types.tokens import TokenSequence
from rollart.types.trajectory import TrainSample

Scalar = TypeVar("Scalar", np.int32, np.float32)

MIN_SHARED_PREFIX = 8
"""Minimum shared-prefix length worth merging, in tokens."""


class Untrainable(Exception):
    """A batch cannot be trained; no state was changed."""


class Item(NamedTuple):
    """One sequence. Action i is the token `targets[i]`, predicted at index `sources[i]` of `fed`."""

    trajectory: TrajectoryId
    fed: NDArray[np.int32]
    """Input tokens, up to the last action."""
    sources: NDArray[np.int64]
    targets: NDArray[np.int32]
    behaviour: NDArray[np.float32]
    turns: NDArray[np.int64]
    """Turn index of each action; non-decreasing."""
    advantages: NDArray[np.float32]
    proximal: NDArray[np.float32] | None = None
    """Log-probabilities under the weights before the first update on the batch. None: use those of the forward pass."""
    returns: NDArray[np.float32] | None = None
    """Targets of the value head; None without a critic."""


class Tree(NamedTuple):
    """Sequences, and for each the length of the prefix it shares with the previous one, which is fed once."""

    members: tuple[Item, ...]
    common: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return sum(member.fed.size for member in self.members) - sum(self.common)


class MicroBatch(NamedTuple):
    """Input of one forward and backward pass; per-token arrays are in the order of `items`."""

    trees: tuple[Tree, ...]

    @property
    def items(self) -> list[Item]:
        return [member for tree in self.trees for member in tree.members]

    @property
    def tokens(self) -> int:
        return sum(tree.tokens for tree in self.trees)


def items(samples: Sequence[TrainSample], vocabulary: int) -> list[Item]:
    """Trainable sequences; raises `Untrainable` naming the offending trajectory."""
    return [
        item
        for sample in samples
        if not sample.masked
        for sequence, turns in zip(sample.sequences, turns_of(sample), strict=True)
        if sequence.sampled
        for item in _item(sample, sequence, turns, vocabulary)
    ]


def turns_of(sample: TrainSample) -> list[NDArray[np.int64]]:
    """For every sequence, the turn index of each sampled token."""
    every = np.repeat(np.arange(len(sample.turns)), [turn.tokens for turn in sample.turns])
    ends = np.cumsum([sequence.sampled for sequence in sample.sequences])
    if every.size != ends[-1]:
        raise Untrainable(
            f"trajectory {sample.trajectory} sampled {ends[-1]} tokens, but its turns have {every.size}; "
            "this is a bug in rollart"
        )
    return np.split(every, ends[:-1])


def turn_advantages(sample: TrainSample) -> NDArray[np.float32]:
    return np.array([turn.advantage for turn in sample.turns], dtype=np.float32)


def last_state(sample: TrainSample, vocabulary: int) -> Item:
    """The last state of a truncated trajectory, as an item with one dummy action; its value is the bootstrap."""
    tokens = _tokens(sample, sample.sequences[-1], vocabulary)
    nothing = np.zeros(1)
    return Item(
        trajectory=sample.trajectory,
        fed=tokens,
        sources=np.array([tokens.size - 1]),
        targets=nothing.astype(np.int32),
        behaviour=nothing.astype(np.float32),
        turns=nothing.astype(np.int64),
        advantages=nothing.astype(np.float32),
    )


def micro_batches(rows: Sequence[Item], token_budget: int, *, share: bool = True) -> list[MicroBatch]:
    """First-fit decreasing, for few and full micro-batches. Deterministic in the items."""
    bins: list[list[Tree]] = []
    room: list[int] = []
    for tree in sorted(_trees(rows, token_budget, share), key=lambda each: -each.tokens):
        for number, left in enumerate(room):
            if tree.tokens <= left:
                bins[number].append(tree)
                room[number] -= tree.tokens
                break
        else:
            bins.append([tree])
            room.append(token_budget - tree.tokens)
    return [MicroBatch(tuple(each)) for each in bins]


def _item(sample: TrainSample, sequence: TokenSequence, turns: NDArray[np.int64], vocabulary: int) -> list[Item]:
    tokens = _tokens(sample, sequence, vocabulary)
    behaviour = _read(sample, sequence.logprobs)
    actions = np.flatnonzero(sequence.action_mask())
    predicted = actions > 0  # nothing predicts the very first token
    actions, turns = actions[predicted], turns[predicted]
    if not actions.size:
        return []
    return [
        Item(
            trajectory=sample.trajectory,
            fed=tokens[: actions[-1]],
            sources=actions - 1,
            targets=tokens[actions],
            behaviour=behaviour[actions],
            turns=turns,
            advantages=turn_advantages(sample)[turns],
        )
    ]


def _tokens(sample: TrainSample, sequence: TokenSequence, vocabulary: int) -> NDArray[np.int32]:
    tokens = _read(sample, sequence.whole().ids)
    if not (tokens.min() >= 0 and tokens.max() < vocabulary):
        raise Untrainable(
            f"trajectory {sample.trajectory} has token ids from {tokens.min()} to {tokens.max()}, "
            f"but the vocabulary size is {vocabulary}: check the codec"
        )
    return tokens


def _read(sample: TrainSample, read: Callable[[], NDArray[Scalar]]) -> NDArray[Scalar]:
    try:
        return read()
    except ValueError as error:
        raise Untrainable(f"trajectory {sample.trajectory} cannot be trained: {error}") from error


def _trees(rows: Sequence[Item], token_budget: int, share: bool) -> list[Tree]:
    """Sort by tokens, so that sequences with a shared prefix are adjacent; start a new tree when one is full."""
    if not share:
        return [Tree((row,), (0,)) for row in rows]
    trees: list[list[tuple[Item, int]]] = []
    used = 0
    for row in sorted(rows, key=lambda each: each.fed.tobytes()):
        common = _common(trees[-1][-1][0].fed, row.fed) if trees else 0
        own = row.fed.size - common
        if common >= MIN_SHARED_PREFIX and used + own <= token_budget:
            trees[-1].append((row, common))
            used += own
        else:
            trees.append([(row, 0)])
            used = row.fed.size
    return [Tree(*zip(*tree, strict=True)) for tree in trees]


def _common(left: NDArray[np.int32], right: NDArray[np.int32]) -> int:
    """Length of the common prefix."""
    length = min(left.size, right.size)
    differ = left[:length] != right[:length]
    first = int(differ.argmax()) if length else 0
    return first if length and differ[first] else length
