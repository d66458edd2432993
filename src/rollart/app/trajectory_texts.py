"""Samples of a run's trajectories as readable text: observations, answers and rewards.

    <run>/trajectories/step-000010.txt      started with the weights of step 10
    <run>/trajectories/step-000010.jsonl    the same token by token, for the page (`observe.page.samples`)

Invariants: the number and size of the files are bounded: about `FILES` training steps and every evaluation, `PER_KIND`
trajectories of each kind, with long texts cut. The text is decoded here from the tokens; a run never reads it back.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from rollart.app.redaction import KEEP_ALL, REDACTED, Redactor
from rollart.backends.environments.codec import Codec
from rollart.observe.page.samples import Part, Sample, Token
from rollart.types.tokens import TokenSequence
from rollart.types.trajectory import FAILURES, TRAINABLE, Purpose, Trajectory
from rollart.types.versions import Version

FILES = 20
PER_KIND = 3
"""Trained trajectories per task and step; as many held-out ones, and as many failed ones."""
LONGEST_TEXT = 2000
"""Maximum characters of one observation or answer."""
MOST_TOKENS = 1000
"""Maximum tokens of an answer that are listed; `MOST_PARTS`: maximum observations and answers of a trajectory."""
MOST_PARTS = 200
HIDDEN_TOKEN = -1
"""Id of a redacted token."""
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
LONGEST_SIGN = 4
"""Maximum bytes of a UTF-8 character, and so the maximum number of tokens that it may take."""


class Piece(NamedTuple):
    """An observation or an answer, with the version and log-probability of each token."""

    tokens: Sequence[int]
    versions: Sequence[Version] = ()
    logprobs: Sequence[float] = ()
    answer: bool = False


class TrajectoryTexts:
    """Decides at the end of each trajectory whether to write it, and writes it."""

    def __init__(
        self, folder: Path, codec: Codec, steps: int, say: Callable[[str], None], redactor: Redactor = KEEP_ALL
    ) -> None:
        self._folder = folder
        self._redactor = redactor
        self._codec = codec
        self._every = math.ceil(steps / FILES)
        self._say = say
        self._written: Counter[tuple[int, str, str]] = Counter()
        self._step = 0
        """Newest step seen: the file for trajectories without a token."""
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
                file.write(describe(trajectory, cause, self._codec, self._redactor) + "\n")
            with (self._folder / f"step-{step:06}.jsonl").open("ab") as lines:
                shown = sample(trajectory, kind, step, cause, self._codec, self._redactor)
                lines.write(msgspec.json.encode(shown) + b"\n")
        except Exception as error:  # noqa: BLE001 - the codec is user code; nothing depends on these texts
            self._lost = True
            self._say(f"{self._folder}: cannot write trajectories, stopping: {type(error).__name__}: {error}")


def describe(trajectory: Trajectory, cause: str, codec: Codec, redactor: Redactor = KEEP_ALL) -> str:
    """The whole trajectory, turn by turn."""
    outcome = "" if trajectory.outcome is None else trajectory.outcome.value
    reward = "no reward" if trajectory.reward is None else f"reward {trajectory.reward:g}"
    head = f"trajectory {trajectory.id}, {trajectory.task}, {trajectory.purpose.value}, prompt {trajectory.prompt.id}"
    lines = [f"=== {head}: {outcome}, {reward}" + (f" ({_shown(redactor.text(cause))})" if cause else "")]
    turn = 0
    for new_context, piece in all_pieces(trajectory):
        if new_context:
            lines.append("--- a new context")
        text = _shown(redactor.text(codec.text(piece.tokens)))
        if piece.answer:
            lines += [f"--- answer {turn + 1}, {_by(piece.versions)}{_earned(trajectory, turn)}", text]
            turn += 1
        elif text:
            lines += ["--- observation", text]
    return "\n".join(lines) + "\n"


def sample(
    trajectory: Trajectory, kind: str, step: int, cause: str, codec: Codec, redactor: Redactor = KEEP_ALL
) -> Sample:
    """The whole trajectory, token by token."""
    versions: dict[Version, int] = {}
    parts: list[Part] = []
    turn = 0
    for new_context, piece in all_pieces(trajectory):
        if piece.answer:
            turn += 1
            tokens = _tokens(piece, versions, codec, redactor)
            earned = trajectory.turn_rewards[turn - 1] if turn <= len(trajectory.turn_rewards) else 0.0
            parts.append(Part(tokens=tokens, turn=turn, earned=earned, new_context=new_context))
        else:
            text = _shown(redactor.text(codec.text(piece.tokens)))
            parts.append(Part(text=text, new_context=new_context))
    return Sample(
        trajectory=trajectory.id,
        task=trajectory.task,
        kind=kind,
        prompt=trajectory.prompt.id,
        step=step,
        outcome="" if trajectory.outcome is None else trajectory.outcome.value,
        reward=trajectory.reward,
        cause=redactor.text(cause),
        versions=tuple(map(str, versions)),
        parts=tuple(parts[:MOST_PARTS]),
        left_out=max(len(parts) - MOST_PARTS, 0),
    )


def _tokens(piece: Piece, versions: dict[Version, int], codec: Codec, redactor: Redactor) -> tuple[Token, ...]:
    """Tokens of a piece. `versions` lists the versions seen so far, in order, and is extended."""
    texts = token_texts(piece.tokens[:MOST_TOKENS], codec)
    hidden = redactor.tokens(texts)
    return tuple(
        Token(
            REDACTED if hide else _shown(text),
            HIDDEN_TOKEN if hide else id,
            round(logprob, 4),
            versions.setdefault(version, len(versions)),
        )
        for text, hide, id, logprob, version in zip(
            texts, hidden, piece.tokens, piece.logprobs, piece.versions, strict=False
        )
    )


def token_texts(ids: Sequence[int], codec: Codec) -> list[str]:
    """Text that each token adds. A character of several tokens is attributed to the last of them.

    >>> from rollart.backends.environments.codec import ByteCodec
    >>> token_texts(list("né".encode()), ByteCodec())
    ['n', '', 'é']
    """
    texts = []
    start, prefix = 0, ""
    for end in range(1, len(ids) + 1):
        text = codec.text(ids[start:end])
        if text.endswith(INCOMPLETE) and end - start <= LONGEST_SIGN and end < len(ids):
            texts.append("")
            continue
        texts.append(text[len(prefix) :])
        # The last token stays in the window: some tokenizers decode a word differently at the start of a text.
        start, prefix = end - 1, codec.text(ids[end - 1 : end])
    return texts


def all_pieces(trajectory: Trajectory) -> Iterator[tuple[bool, Piece]]:
    """Pieces of the trajectory in order, up to the last observation, each with whether it starts a new context."""
    answered = 0
    for number, sequence in enumerate(trajectory.sequences):
        new_context = number > 0
        for piece in pieces(sequence, trajectory.turn_tokens[answered:]):
            answered += piece.answer
            yield new_context, piece
            new_context = False
    if trajectory.last_observation.length:
        yield False, Piece(trajectory.last_observation.ids().tolist())


def pieces(sequence: TokenSequence, turn_tokens: Sequence[int]) -> Iterator[Piece]:
    """Pieces of a sequence in order. `turn_tokens`: lengths of its turns, and maybe of later ones."""
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
    """Train, eval or failed; empty for trajectories cancelled for unrelated reasons."""
    if trajectory.outcome in FAILURES:
        return "failed"
    return trajectory.purpose.value if trajectory.outcome in TRAINABLE else ""


def _by(versions: Sequence[Version]) -> str:
    return "with " + " and ".join(map(str, dict.fromkeys(versions)))


def _earned(trajectory: Trajectory, turn: int) -> str:
    """Reward of a turn; the last turn of a failed episode has none."""
    rewards = trajectory.turn_rewards
    return f", earned {rewards[turn]:g}" if turn < len(rewards) and rewards[turn] else ""


def _shown(text: str) -> str:
    """The text without control characters that would affect a terminal."""
    left = len(text) - LONGEST_TEXT
    printable = "".join(
        char if char.isprintable() or char in "\n\t" else f"\\x{ord(char):02x}" for char in text[:LONGEST_TEXT]
    )
    return printable if left <= 0 else f"{printable} … ({left:,} characters more)"
