"""Trajectories as rows of tokens without padding, cut into mini-batches and by a token budget.

    samples ──► Item (one sequence: what is fed, what is predicted) ──► mini-batches (one optimiser step each)
    a mini-batch ──► Cluster (one prompt, its members) ──► MicroBatch (one forward and backward pass)

    a micro-batch    | prompt A | rest A1 | rest A2 | prompt B with its only rest | …      one row, no padding
    positions        0 …      p p …       p …       0 …

What holds:
- every action token that has a token before it is in exactly one mini-batch, and there in exactly one micro-batch; all
  of a trajectory are in the same mini-batch, all of a sequence in the same micro-batch;
- a micro-batch has at most `token_budget` tokens, unless it is one sequence that alone is longer;
- sequences with the same prompt share it: it is there once per micro-batch;
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


class Untrainable(Exception):
    """A batch cannot be trained; nothing was changed."""


class Item(NamedTuple):
    """One sequence. Action i is the token `targets[i]`, predicted where the token with index `sources[i]` is fed."""

    trajectory: TrajectoryId
    prompt: bytes
    """The tokens up to the first action."""
    prompt_length: int
    rest: NDArray[np.int32]
    """What is fed after the prompt."""
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


class Cluster(NamedTuple):
    """Members with the same prompt, which is fed once."""

    members: tuple[Item, ...]

    @property
    def tokens(self) -> int:
        return self.members[0].prompt_length + sum(member.rest.size for member in self.members)


class MicroBatch(NamedTuple):
    """What one forward and backward pass computes; arrays over its action tokens are in the order of `items`."""

    clusters: tuple[Cluster, ...]

    @property
    def items(self) -> list[Item]:
        return [member for cluster in self.clusters for member in cluster.members]

    @property
    def tokens(self) -> int:
        return sum(cluster.tokens for cluster in self.clusters)


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
        prompt=tokens.tobytes(),
        prompt_length=tokens.size,
        rest=tokens[:0],
        sources=np.array([tokens.size - 1]),
        targets=nothing.astype(np.int32),
        behaviour=nothing.astype(np.float32),
        turns=nothing.astype(np.int64),
        advantages=nothing.astype(np.float32),
    )


def micro_batches(rows: Sequence[Item], token_budget: int, *, share_prompts: bool = True) -> list[MicroBatch]:
    """First-fit decreasing, so that micro-batches are few and full. The same items give the same cut."""
    bins: list[list[Cluster]] = []
    room: list[int] = []
    pieces = [piece for cluster in _clusters(rows, share_prompts) for piece in _cut(cluster, token_budget)]
    for piece in sorted(pieces, key=lambda each: -each.tokens):
        for number, left in enumerate(room):
            if piece.tokens <= left:
                bins[number].append(piece)
                room[number] -= piece.tokens
                break
        else:
            bins.append([piece])
            room.append(token_budget - piece.tokens)
    return [MicroBatch(tuple(each)) for each in bins]


def _item(sample: TrainSample, sequence: TokenSequence, turns: NDArray[np.int64], vocabulary: int) -> list[Item]:
    tokens = _tokens(sample, sequence, vocabulary)
    behaviour = _read(sample, sequence.logprobs)
    actions = np.flatnonzero(sequence.action_mask())
    predicted = actions > 0  # nothing predicts the very first token
    actions, turns = actions[predicted], turns[predicted]
    if not actions.size:
        return []
    first, last = int(actions[0]), int(actions[-1])
    return [
        Item(
            trajectory=sample.trajectory,
            prompt=tokens[:first].tobytes(),
            prompt_length=first,
            rest=tokens[first:last],
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


def _clusters(rows: Sequence[Item], share_prompts: bool) -> list[Cluster]:
    if not share_prompts:
        return [Cluster((row,)) for row in rows]
    by_prompt: dict[bytes, list[Item]] = {}
    for row in rows:
        by_prompt.setdefault(row.prompt, []).append(row)
    return [Cluster(tuple(members)) for members in by_prompt.values()]


def _cut(cluster: Cluster, token_budget: int) -> list[Cluster]:
    """Pieces that fit, each with a prompt of its own."""
    pieces: list[list[Item]] = []
    used = 0
    for member in cluster.members:
        if pieces and used + member.rest.size <= token_budget:
            pieces[-1].append(member)
            used += member.rest.size
        else:
            pieces.append([member])
            used = member.prompt_length + member.rest.size
    return [Cluster(tuple(piece)) for piece in pieces]
