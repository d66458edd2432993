"""Trajectories as rows of tokens without padding, cut into mini-batches and by a token budget.

    samples ──► Item (one sequence: what is fed, what is predicted) ──► mini-batches (one optimiser step each)
    a mini-batch ──► Tree (sequences with a common beginning) ──► MicroBatch (one forward and backward pass)

    a micro-batch    | A 0 … 9 | A1 7 … 12 | A2 7 … 9 | B 0 … 5 | …      one row, no padding

What holds:
- every action token that has a token before it is in exactly one mini-batch, and there in exactly one micro-batch; all
  of a trajectory are in the same mini-batch, all of a sequence in the same micro-batch;
- a micro-batch has at most `token_budget` tokens, unless it is one sequence that alone is longer;
- sequences that begin alike share their beginning: the prompt of a group, the instructions of a task, the first turns
  where several went the same way, what is left of a context that was cut. It is there once per micro-batch;
- what nothing is predicted from, behind the last action of a sequence, is left out;
- masked samples are not there: all that they do, the group's baseline, is in the others' advantages already.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from rollart.types.ids import TrajectoryId
from rollart.types.tokens import TokenSequence
from rollart.types.trajectory import TrainSample

Scalar = TypeVar("Scalar", np.int32, np.float32)

SHARED_FROM = 8
"""Tokens from which on a common beginning is worth being looked for in another place."""


class Untrainable(Exception):
    """A batch cannot be trained; nothing was changed."""


class Item(NamedTuple):
    """One sequence. Action i is the token `targets[i]`, predicted where the token with index `sources[i]` is fed."""

    trajectory: TrajectoryId
    fed: NDArray[np.int32]
    """Its tokens up to the last action."""
    sources: NDArray[np.int64]
    targets: NDArray[np.int32]
    behaviour: NDArray[np.float32]
    turns: NDArray[np.int64]
    """Which turn of the trajectory each action is part of; never goes down."""
    advantages: NDArray[np.float32]
    proximal: NDArray[np.float32] | None = None
    """Log-probabilities by the weights before the first update on the batch. None: those of the forward pass are."""
    returns: NDArray[np.float32] | None = None
    """What the value head has to learn; None: there is no value head."""


class Tree(NamedTuple):
    """Sequences, and of each how many tokens it has in common with the one before it: those are fed once."""

    members: tuple[Item, ...]
    common: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return sum(member.fed.size for member in self.members) - sum(self.common)


class MicroBatch(NamedTuple):
    """What one forward and backward pass computes; arrays over its action tokens are in the order of `items`."""

    trees: tuple[Tree, ...]

    @property
    def items(self) -> list[Item]:
        return [member for tree in self.trees for member in tree.members]

    @property
    def tokens(self) -> int:
        return sum(tree.tokens for tree in self.trees)


def items(samples: Sequence[TrainSample], vocabulary: int) -> list[Item]:
    """What there is to train; raises `Untrainable` with the trajectory that is not."""
    return [
        item
        for sample in samples
        if not sample.masked
        for sequence, turns in zip(sample.sequences, turns_of(sample), strict=True)
        if sequence.sampled
        for item in _item(sample, sequence, turns, vocabulary)
    ]


def turns_of(sample: TrainSample) -> list[NDArray[np.int64]]:
    """For every sequence, the number of the turn that each of its sampled tokens is part of."""
    every = np.repeat(np.arange(len(sample.turns)), [turn.tokens for turn in sample.turns])
    ends = np.cumsum([sequence.sampled for sequence in sample.sequences])
    if every.size != ends[-1]:
        raise Untrainable(
            f"trajectory {sample.trajectory} sampled {ends[-1]} tokens, but those of its turns are {every.size}; "
            "this is a bug of rollart"
        )
    return np.split(every, ends[:-1])


def turn_advantages(sample: TrainSample) -> NDArray[np.float32]:
    return np.array([turn.advantage for turn in sample.turns], dtype=np.float32)


def mini_batches(rows: Sequence[Item], count: int) -> list[list[Item]]:
    """Trajectories dealt like cards, so that every mini-batch sees every group and task; fewer where they run out."""
    place = {id: number for number, id in enumerate(dict.fromkeys(row.trajectory for row in rows))}
    dealt: list[list[Item]] = [[] for _ in range(min(count, len(place)))]
    for row in rows:
        dealt[place[row.trajectory] % len(dealt)].append(row)
    return dealt


def last_state(sample: TrainSample, vocabulary: int) -> Item:
    """The state that a trajectory was left in, as an item with one action that was never taken: its value is asked."""
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
    """First-fit decreasing, so that micro-batches are few and full. The same items give the same cut."""
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
            f"trajectory {sample.trajectory} has tokens from {tokens.min()} to {tokens.max()}, "
            f"but the vocabulary has {vocabulary}: check the codec"
        )
    return tokens


def _read(sample: TrainSample, read: Callable[[], NDArray[Scalar]]) -> NDArray[Scalar]:
    try:
        return read()
    except ValueError as error:
        raise Untrainable(f"trajectory {sample.trajectory} cannot be trained: {error}") from error


def _trees(rows: Sequence[Item], token_budget: int, share: bool) -> list[Tree]:
    """In the order of their tokens, those that begin alike follow each other; a tree is cut where it is full."""
    if not share:
        return [Tree((row,), (0,)) for row in rows]
    trees: list[list[tuple[Item, int]]] = []
    used = 0
    for row in sorted(rows, key=lambda each: each.fed.tobytes()):
        common = _common(trees[-1][-1][0].fed, row.fed) if trees else 0
        own = row.fed.size - common
        if common >= SHARED_FROM and used + own <= token_budget:
            trees[-1].append((row, common))
            used += own
        else:
            trees.append([(row, 0)])
            used = row.fed.size
    return [Tree(*zip(*tree, strict=True)) for tree in trees]


def _common(left: NDArray[np.int32], right: NDArray[np.int32]) -> int:
    """How many tokens are the same from the start."""
    length = min(left.size, right.size)
    differ = left[:length] != right[:length]
    first = int(differ.argmax()) if length else 0
    return first if length and differ[first] else length
