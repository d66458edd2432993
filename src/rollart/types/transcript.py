"""Transcript: what happened in one episode, as text, for reward functions.

It is made beside the environment when an episode ends. The controller carries it as opaque bytes (`pack`) and never
decodes it; reward functions, the store of the run and people see a `Transcript` or its JSON form.

Invariants: the byte form of a transcript is bounded: at most `MAX_BYTES` before compression, which `unpack` enforces as
well. Whatever was cut to fit is listed in `cut` and marked in the text itself, so nothing is shortened silently.
"""

import enum
import math
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from rollart.types.ids import PromptId, TrajectoryId

MAX_BYTES = 2**20
"""Maximum size of a transcript before compression."""
_PACKED_1 = b"\x01"
"""First byte of the packed form: its format."""
_MARK_BYTES = 64
"""Upper bound on what marking one cut adds: the sentence in the text and the entry in `cut`, without its path."""


class Truncation(enum.Enum):
    """Which of the agent's own limits ended an episode. It is the agent's result, not a failure."""

    ENVIRONMENT = "environment"
    """The environment reported `truncated`: its time, its memory, its own number of moves."""
    TURNS = "turns"
    """`max_turns` of the task."""
    CONTEXT = "context"
    """`max_context` of the task."""


class ToolCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """One tool call of an action. Its result is in the observation that follows."""

    name: str
    arguments: dict[str, Any] = {}
    error: str = ""
    """Why it gave no result: malformed, out of time, or what the tool raised."""


class TranscriptTurn(msgspec.Struct, frozen=True, omit_defaults=True):
    """One turn: what the agent saw, what it answered, and what the environment gave for it."""

    observation: str
    action: str
    reward: float = 0.0
    state: str = ""
    """Name that the environment gave to the state in which the agent acted; empty = the observation is the state."""
    fresh_context: bool = False
    """The observation replaced the history instead of following it."""
    calls: tuple[ToolCall, ...] = ()
    """Tool calls of the action, in order."""
    messages: bool = False
    """The agent saw messages, of which `observation` is the text."""


class Transcript(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One finished episode.

    >>> turn = TranscriptTurn("What is 6 * 7?", "42", reward=0.5)
    >>> t = Transcript(task="math", trajectory=TrajectoryId(1), prompt_id=PromptId("9"), seed=9, member=0,
    ...                prompt={"answer": "42"}, turns=(turn,), final_observation="Right.")
    >>> t.final_text == t.prompt["answer"], t.earned
    (True, 0.5)
    >>> Transcript.from_json(t.to_json()) == t
    True
    """

    task: str
    trajectory: TrajectoryId
    prompt_id: PromptId
    seed: int
    """Seed of the prompt."""
    member: int
    """Number among the attempts at this prompt; a replacement has a number of its own."""
    prompt: dict[str, Any] = {}
    """Data of the prompt: the fields of its line, for prompts from a JSON-lines file."""
    turns: tuple[TranscriptTurn, ...] = ()
    final_observation: str = ""
    """What the environment answered to the last action."""
    truncated: Truncation | None = None
    """The limit that ended the episode; None if the environment ended it by itself."""
    artifact: bytes = b""
    """Data that the environment's last step handed over, such as a diff or a file."""
    cut: dict[str, int] = {}
    """What was cut to keep the transcript within `MAX_BYTES`: place, and number of characters (or bytes, or turns)."""

    @property
    def final_text(self) -> str:
        """Text of the agent's last action; empty if it never acted."""
        return self.turns[-1].action if self.turns else ""

    @property
    def earned(self) -> float:
        """Sum of the rewards that the environment gave."""
        return math.fsum(turn.reward for turn in self.turns)

    def to_json(self) -> bytes:
        """The JSON form. Defaults are omitted, bytes are base64; `json_schema` describes it."""
        return msgspec.json.encode(self)

    @staticmethod
    def from_json(text: bytes | str) -> "Transcript":
        return msgspec.json.decode(text, type=Transcript)


def json_schema() -> dict[str, Any]:
    """JSON Schema of the JSON form: `docs/transcript.schema.json`."""
    return msgspec.json.schema(Transcript)


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Transcript] = msgspec.msgpack.Decoder(Transcript)


def pack(transcript: Transcript, limit: int = MAX_BYTES) -> bytes:
    """The transcript as compressed bytes; one that is larger than `limit` is cut first."""
    body = _encoder.encode(transcript)
    if len(body) > limit:
        body = _encoder.encode(_shortened(transcript, limit))
    return _PACKED_1 + zlib.compress(body, 1)


def unpack(packed: bytes, limit: int = MAX_BYTES) -> Transcript:
    """The transcript of `pack`; `ValueError` if these bytes are not one, or larger than `limit`."""
    if packed[:1] != _PACKED_1:
        raise ValueError("this is not a packed transcript, or one of a newer version of rollart")
    inflate = zlib.decompressobj()
    try:
        body = inflate.decompress(packed[1:], limit + 1)
    except zlib.error as error:
        raise ValueError(f"the packed transcript is damaged: {error}") from error
    if len(body) > limit or not inflate.eof:
        raise ValueError(f"the packed transcript is truncated, or larger than {limit:,} bytes")
    try:
        return _decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise ValueError(f"the packed transcript is damaged: {error}") from error


# --- cutting --------------------------------------------------------------------------------------------------------


def _shortened(transcript: Transcript, limit: int) -> Transcript:
    """The transcript with its longest texts cut, and, if that is not enough, without turns in its middle.

    Prompt data is cut where it is text at the top level, and left out where the rest of it alone is too large.
    """
    transcript = _without_nested_data(_without_calls(transcript), limit // 4)
    transcript = _without_turns(transcript, limit // 2)
    texts = dict(_texts(transcript))
    frame = len(_encoder.encode(_with_texts(transcript, dict.fromkeys(texts, ""), {}, b"")))
    marks = sum(_MARK_BYTES + len(path) for path in [*texts, "artifact"])
    sizes = {path: len(text.encode()) for path, text in texts.items()} | {"artifact": len(transcript.artifact)}
    room = _common_room(sizes.values(), max(0, limit - frame - marks - 5 * len(sizes)))
    cut = dict(transcript.cut)
    kept: dict[str, str] = {}
    for path, text in texts.items():
        kept[path], lost = _cut_text(text, room)
        if lost:
            cut[path] = lost
    artifact = transcript.artifact[:room]
    if len(artifact) < len(transcript.artifact):
        cut["artifact"] = len(transcript.artifact) - len(artifact)
    return _with_texts(transcript, kept, cut, artifact)


def _common_room(sizes: Iterable[int], budget: int) -> int:
    """The largest size to which all can be cut so that they fit together: short ones are kept whole.

    >>> _common_room([10, 100, 1000], 300)
    190
    """
    left = sorted(sizes)
    for index, size in enumerate(left):
        others = len(left) - index
        if size * others > budget:
            return budget // others
        budget -= size
    return left[-1] if left else 0


def _cut_text(text: str, room: int) -> tuple[str, int]:
    """Beginning and end of a text that is longer than `room` bytes, and the number of characters between them."""
    encoded = text.encode()
    if len(encoded) <= room:
        return text, 0
    head = encoded[: room // 2].decode(errors="ignore")
    tail = encoded[len(encoded) - (room - room // 2) :].decode(errors="ignore")
    lost = len(text) - len(head) - len(tail)
    return f"{head} …[{lost} characters cut]… {tail}", lost


def _texts(transcript: Transcript) -> Iterable[tuple[str, str]]:
    """The texts that may be cut, by place."""
    for number, turn in enumerate(transcript.turns):
        yield f"turns[{number}].observation", turn.observation
        yield f"turns[{number}].action", turn.action
        if turn.state:
            yield f"turns[{number}].state", turn.state
    yield "final_observation", transcript.final_observation
    for key, value in transcript.prompt.items():
        if isinstance(value, str):
            yield f"prompt[{key!r}]", value


def _with_texts(transcript: Transcript, texts: dict[str, str], cut: dict[str, int], artifact: bytes) -> Transcript:
    turns = tuple(
        msgspec.structs.replace(
            turn,
            observation=texts[f"turns[{number}].observation"],
            action=texts[f"turns[{number}].action"],
            state=texts.get(f"turns[{number}].state", ""),
        )
        for number, turn in enumerate(transcript.turns)
    )
    prompt = {key: texts.get(f"prompt[{key!r}]", value) for key, value in transcript.prompt.items()}
    return msgspec.structs.replace(
        transcript,
        turns=turns,
        prompt=prompt,
        final_observation=texts["final_observation"],
        cut=cut,
        artifact=artifact,
    )


def _without_nested_data(transcript: Transcript, room: int) -> Transcript:
    """Leave out prompt fields that are not text and larger than all of them may be together, the largest first."""
    sizes = {key: len(_encoder.encode(value)) for key, value in transcript.prompt.items() if not isinstance(value, str)}
    cut, prompt = dict(transcript.cut), dict(transcript.prompt)
    # Keys count as well: a prompt with too many fields is no better than one with a large field.
    spent = {key: sizes.get(key, 0) + len(key.encode()) + _MARK_BYTES for key in prompt}
    total = sum(spent.values())
    for key in sorted(prompt, key=lambda name: (-spent[name], name)):
        if total <= room:
            break
        cut["prompt"] = cut.get("prompt", 0) + 1
        del prompt[key]
        total -= spent[key]
    return msgspec.structs.replace(transcript, prompt=prompt, cut=cut)


def _without_calls(transcript: Transcript) -> Transcript:
    """Leave out the parsed calls; their text is in the actions."""
    found = sum(len(turn.calls) for turn in transcript.turns)
    if not found:
        return transcript
    turns = tuple(msgspec.structs.replace(turn, calls=()) for turn in transcript.turns)
    return msgspec.structs.replace(transcript, turns=turns, cut=dict(transcript.cut) | {"calls": found})


def _without_turns(transcript: Transcript, room: int) -> Transcript:
    """Leave out turns in the middle if not even shortened texts of all turns fit."""
    most = max(2, room // (8 * _MARK_BYTES))
    turns: Sequence[TranscriptTurn] = transcript.turns
    if len(turns) <= most:
        return transcript
    first, last = turns[: most // 2], turns[len(turns) - (most - most // 2) :]
    cut = dict(transcript.cut) | {"turns": len(turns) - most}
    return msgspec.structs.replace(transcript, turns=(*first, *last), cut=cut)
