"""Some trajectories of a run as text, for people to read: what the agents saw, said and got.

    <run>/trajectories/step-000010.txt      begun with the weights of step 10
    <run>/trajectories/step-000010.jsonl    the same token by token, for the page (`observe.page.samples`)

What holds: the number of files and the size of each are bounded, whatever the run does: about `FILES` steps of training
and every evaluation, `PER_KIND` trajectories of a kind each, long texts cut. Text is a view that is made here from
the tokens; no run reads it again.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from rollart.backends.environments.codec import Codec
from rollart.observe.page.samples import Part, Sample, Token
from rollart.types.tokens import TokenSequence
from rollart.types.trajectory import TRAINABLE, Outcome, Purpose, Trajectory
from rollart.types.versions import Version

FILES = 20
PER_KIND = 3
"""Trajectories of one task and step that are trained on; as many that are held out, and that failed."""
LONGEST_TEXT = 2000
"""Characters of one observation or answer."""
MOST_TOKENS = 1000
"""Tokens of one answer that are told one by one; `MOST_PARTS`: observations and answers of a trajectory."""
MOST_PARTS = 200
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
LONGEST_SIGN = 4
"""Bytes of a sign of UTF-8, and so tokens that it may take."""
FAILED = (Outcome.ENV_FAILED, Outcome.ENGINE_FAILED, Outcome.REWARD_FAILED)


class Piece(NamedTuple):
    """An observation, or what the agent answered, with the version and log-probability that each token has."""

    tokens: Sequence[int]
    versions: Sequence[Version] = ()
    logprobs: Sequence[float] = ()
    answer: bool = False


class TrajectoryTexts:
    """Writes a trajectory when it ends, or does not."""

    def __init__(self, folder: Path, codec: Codec, steps: int, say: Callable[[str], None]) -> None:
        self._folder = folder
        self._codec = codec
        self._every = math.ceil(steps / FILES)
        self._say = say
        self._written: Counter[tuple[int, str, str]] = Counter()
        self._step = 0
        """The newest that was seen: where a trajectory without a token belongs."""
        self._lost = False

    def ended(self, trajectory: Trajectory, cause: str) -> None:
        first = trajectory.first_version
        step = self._step if first is None else first.step
        self._step = max(self._step, step)
        kind = _kind(trajectory)
        if self._lost or not kind or (kind != Purpose.EVAL.value and step % self._every):
            return
        key = (step, trajectory.task, kind)
        if self._written[key] >= PER_KIND:
            return
        self._written[key] += 1
        try:
            self._folder.mkdir(exist_ok=True)
            with (self._folder / f"step-{step:06}.txt").open("a", encoding="utf-8") as file:
                file.write(describe(trajectory, cause, self._codec) + "\n")
            with (self._folder / f"step-{step:06}.jsonl").open("ab") as lines:
                lines.write(msgspec.json.encode(sample(trajectory, kind, step, cause, self._codec)) + b"\n")
        except OSError as error:
            # Nothing depends on these texts; what the run needs has errors of its own.
            self._lost = True
            self._say(f"{self._folder}: no more trajectories are written there: {error}")


def describe(trajectory: Trajectory, cause: str, codec: Codec) -> str:
    """The whole trajectory, turn by turn."""
    outcome = "" if trajectory.outcome is None else trajectory.outcome.value
    reward = "no reward" if trajectory.reward is None else f"reward {trajectory.reward:g}"
    head = f"trajectory {trajectory.id}, {trajectory.task}, {trajectory.purpose.value}, prompt {trajectory.prompt.id}"
    lines = [f"=== {head}: {outcome}, {reward}" + (f" ({cause})" if cause else "")]
    turn = 0
    for number, sequence in enumerate(trajectory.sequences):
        if number:
            lines.append("--- a new context")
        for piece in pieces(sequence, trajectory.turn_tokens[turn:]):
            text = _shown(codec.text(piece.tokens))
            if piece.answer:
                lines += [f"--- answer {turn + 1}, {_by(piece.versions)}{_earned(trajectory, turn)}", text]
                turn += 1
            elif text:
                lines += ["--- observation", text]
    return "\n".join(lines) + "\n"


def sample(trajectory: Trajectory, kind: str, step: int, cause: str, codec: Codec) -> Sample:
    """The whole trajectory, token by token."""
    versions: dict[Version, int] = {}
    parts: list[Part] = []
    turn = 0
    for number, sequence in enumerate(trajectory.sequences):
        new_context = number > 0
        for piece in pieces(sequence, trajectory.turn_tokens[turn:]):
            if piece.answer:
                turn += 1
                tokens = _tokens(piece, versions, codec)
                earned = trajectory.turn_rewards[turn - 1] if turn <= len(trajectory.turn_rewards) else 0.0
                parts.append(Part(tokens=tokens, turn=turn, earned=earned, new_context=new_context))
            else:
                parts.append(Part(text=_shown(codec.text(piece.tokens)), new_context=new_context))
            new_context = False
    return Sample(
        trajectory=trajectory.id,
        task=trajectory.task,
        kind=kind,
        prompt=trajectory.prompt.id,
        step=step,
        outcome="" if trajectory.outcome is None else trajectory.outcome.value,
        reward=trajectory.reward,
        cause=cause,
        versions=tuple(map(str, versions)),
        parts=tuple(parts[:MOST_PARTS]),
        left_out=max(len(parts) - MOST_PARTS, 0),
    )


def _tokens(piece: Piece, versions: dict[Version, int], codec: Codec) -> tuple[Token, ...]:
    """`versions` are those met so far, in order; it grows."""
    texts = token_texts(piece.tokens[:MOST_TOKENS], codec)
    return tuple(
        Token(_shown(text), id, round(logprob, 4), versions.setdefault(version, len(versions)))
        for text, id, logprob, version in zip(texts, piece.tokens, piece.logprobs, piece.versions, strict=False)
    )


def token_texts(ids: Sequence[int], codec: Codec) -> list[str]:
    """What each token adds to the text. A sign of several tokens comes with the last of them.

    >>> from rollart.backends.environments.codec import ByteCodec
    >>> token_texts(list("né".encode()), ByteCodec())
    ['n', '', 'é']
    """
    texts = []
    start, said = 0, ""
    for end in range(1, len(ids) + 1):
        text = codec.text(ids[start:end])
        if text.endswith(INCOMPLETE) and end - start <= LONGEST_SIGN and end < len(ids):
            texts.append("")
            continue
        texts.append(text[len(said) :])
        # The last token stays in view: to some tokenizers a word is another one at the beginning of a text.
        start, said = end - 1, codec.text(ids[end - 1 : end])
    return texts


def pieces(sequence: TokenSequence, turn_tokens: Sequence[int]) -> Iterator[Piece]:
    """A sequence in order. `turn_tokens`: the lengths of its turns, and maybe of later ones."""
    ids = sequence.whole().ids().tolist()
    sampled = sequence.action_mask().tolist()
    versions = [run.version for run in sequence.runs() for _ in range(run.length)]
    logprobs = sequence.logprobs().tolist()
    turns = iter(turn_tokens)
    start = answered = 0
    while start < len(ids):
        if sampled[start]:
            end = start + next(turns)
            by = versions[answered : answered + end - start]
            answered += end - start
            yield Piece(ids[start:end], by, logprobs[start:end], answer=True)
        else:
            end = next((place for place in range(start, len(ids)) if sampled[place]), len(ids))
            yield Piece(ids[start:end])
        start = end


def _kind(trajectory: Trajectory) -> str:
    """Train, eval, failed, or nothing that is worth reading: stopped for reasons of others."""
    if trajectory.outcome in FAILED:
        return "failed"
    return trajectory.purpose.value if trajectory.outcome in TRAINABLE else ""


def _by(versions: Sequence[Version]) -> str:
    return "with " + " and ".join(map(str, dict.fromkeys(versions)))


def _earned(trajectory: Trajectory, turn: int) -> str:
    """What the environment gave for a turn; the last one of a failed episode got no answer."""
    rewards = trajectory.turn_rewards
    return f", earned {rewards[turn]:g}" if turn < len(rewards) and rewards[turn] else ""


def _shown(text: str) -> str:
    """As it was said, but for what would do something to a terminal."""
    left = len(text) - LONGEST_TEXT
    said = "".join(
        char if char.isprintable() or char in "\n\t" else f"\\x{ord(char):02x}" for char in text[:LONGEST_TEXT]
    )
    return said if left <= 0 else f"{said} … ({left:,} characters more)"
