"""Transcripts: both of their forms, how large they may be, and that nothing is cut silently."""

import json
import zlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollart.types.ids import PromptId, TrajectoryId
from rollart.types.transcript import (
    MAX_BYTES,
    Transcript,
    TranscriptTurn,
    Truncation,
    json_schema,
    pack,
    unpack,
)

TURN = TranscriptTurn("Where to?", "north", reward=0.5, state="door", fresh_context=True)


def transcript(**changes: Any) -> Transcript:
    whole: dict[str, Any] = {
        "task": "maze",
        "trajectory": TrajectoryId(7),
        "prompt_id": PromptId("p1"),
        "seed": 3,
        "member": 2,
        "prompt": {"answer": "42", "map": [[0, 1], [1, None]], "size": 2.5},
        "turns": (TURN, TranscriptTurn("A wall.", "ö\n\0")),
        "final_observation": "Out.",
        "truncated": Truncation.TURNS,
        "artifact": b"\x00\xff",
    }
    return Transcript(**(whole | changes))


def size(of: Transcript) -> int:
    return len(msgspec.msgpack.encode(of))


def test_both_forms_are_read_back_as_they_were_written() -> None:
    for each in (transcript(), transcript(turns=(), prompt={}, truncated=None, artifact=b"", final_observation="")):
        assert unpack(pack(each)) == each
        assert Transcript.from_json(each.to_json()) == each


def test_what_a_reward_asks_for() -> None:
    each = transcript()
    assert each.prompt["answer"] == "42"
    assert each.final_text == "ö\n\0"
    assert each.earned == 0.5
    assert transcript(turns=()).final_text == ""


def test_the_documented_schema_is_that_of_the_json_form() -> None:
    path = Path(__file__).parents[2] / "docs" / "transcript.schema.json"
    assert json.loads(path.read_text(encoding="utf-8")) == json.loads(json.dumps(json_schema()))


def test_a_transcript_at_the_limit_is_whole_and_one_beyond_it_is_cut_and_says_so() -> None:
    room = MAX_BYTES - size(transcript(final_observation="x" * 100_000)) + 100_000
    longest = transcript(final_observation="x" * room)
    assert size(longest) == MAX_BYTES
    assert unpack(pack(longest)).cut == {}
    longer = transcript(final_observation="x" * (room + 1))
    cut = unpack(pack(longer))
    assert list(cut.cut) == ["final_observation"]
    assert f"[{cut.cut['final_observation']} characters cut]" in cut.final_observation
    assert size(cut) <= MAX_BYTES
    assert cut.turns == longer.turns, "short texts are whole"


def test_a_long_text_keeps_its_beginning_and_its_end() -> None:
    cut = unpack(pack(transcript(turns=(TranscriptTurn("", "A" + "…" * MAX_BYTES + "the answer is 7"),))))
    assert cut.final_text.startswith("A…")
    assert cut.final_text.endswith("…the answer is 7")
    assert list(cut.cut) == ["turns[0].action"]


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"artifact": bytes(2 * MAX_BYTES)}, "artifact"),
        ({"prompt": {"answer": "42", "text": "t" * 2 * MAX_BYTES}}, "prompt['text']"),
        ({"prompt": {"answer": "42", "table": [1] * 2 * MAX_BYTES}}, "prompt"),
        ({"turns": (TURN,) * 200_000}, "turns"),
        ({"turns": (TranscriptTurn("o", "a", state="s" * 2 * MAX_BYTES),)}, "turns[0].state"),
    ],
)
def test_whatever_is_too_large_is_cut_and_named(changes: dict[str, Any], place: str) -> None:
    cut = unpack(pack(transcript(**changes)))
    assert cut.cut[place] > 0
    assert size(cut) <= MAX_BYTES
    assert cut.prompt.get("answer") == "42", "what fits stays"
    assert cut.turns[0].action.startswith(("n", "a"))


def test_many_prompt_fields_are_left_out_until_the_rest_fits() -> None:
    cut = unpack(pack(transcript(prompt={f"key{index}": index for index in range(200_000)})))
    assert cut.cut["prompt"] + len(cut.prompt) == 200_000
    assert size(cut) <= MAX_BYTES


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"\x02" + pack(transcript())[1:],
        pack(transcript())[:-1],
        b"\x01junk",
        b"\x01" + zlib.compress(b"\xc1"),
        b"\x01" + zlib.compress(bytes(MAX_BYTES + 1)),
    ],
    ids=["empty", "newer", "cut off", "not compressed", "no transcript", "too large"],
)
def test_what_is_no_packed_transcript_is_refused(packed: bytes) -> None:
    with pytest.raises(ValueError, match="packed transcript"):
        unpack(packed)
