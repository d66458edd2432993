"""Patterns and secrets are removed from every text that is kept, whatever it is part of."""

import pytest

from rollart.app.redaction import REDACTED, Redactor
from rollart.types.transcript import ToolCall, Transcript, TranscriptTurn, pack, unpack

KEY = "key-12345"


def transcript(**changes):
    values = {"task": "t", "trajectory": 1, "prompt_id": "p", "seed": 0, "member": 0, **changes}
    return Transcript(**values)


@pytest.mark.parametrize(
    "given",
    [
        {"turns": (TranscriptTurn(f"see {KEY}", "do"), TranscriptTurn("a", f"{KEY} b", state=KEY))},
        {"final_observation": f"the end: {KEY}"},
        {"prompt": {"answer": KEY, "deep": [{"x": ["-", f"<{KEY}>"]}], KEY: 1}},
        {"artifact": b"\xff\x00" + KEY.encode() + b"\xfe"},
        {"turns": (TranscriptTurn("a", "b", calls=(ToolCall(KEY, {"k": [KEY], KEY: {"x": KEY}}, f"no {KEY}"),)),)},
        {"prompt_id": KEY, "task": KEY, "cut": {f"prompt['{KEY}']": 3}},
    ],
)
def test_a_stored_transcript_has_no_match_left(given):
    stored = Redactor([r"key-\d+"]).packed(pack(transcript(**given)))
    text = repr(unpack(stored))
    assert KEY not in text
    assert REDACTED in text


def test_bytes_around_a_match_stay():
    stored = Redactor(["key"]).packed(pack(transcript(artifact=b"\xffkey\xfe")))
    assert unpack(stored).artifact == b"\xff[redacted]\xfe"


def test_without_patterns_transcripts_are_not_even_opened():
    assert Redactor().packed(b"anything") == b"anything"
    assert Redactor(["x"]).packed(b"anything") == b""


@pytest.mark.parametrize(
    ("texts", "hidden"),
    [
        (["a key", "-", "17 b"], [True, True, True]),
        (["a ", "key-17", " b"], [False, True, False]),
        (["a ", "ke", "", "y-1", " key", "s"], [False, True, True, True, False, False]),
    ],
)
def test_every_token_of_a_match_is_hidden(texts, hidden):
    assert Redactor(["key-[0-9]+"]).tokens(texts) == hidden


@pytest.mark.parametrize(
    ("patterns", "text", "left"),
    [
        (["key", "(?i)bearer [a-z]+"], "a Key, BEARER abc", f"a Key, {REDACTED}"),
        ([r"(\w+)@corp", r"(\d{4})-\1"], "me@corp has 1234-1234", f"{REDACTED} has {REDACTED}"),
        ([r"(?P<q>a)b(?P=q)", r"(?P<q>c)d(?P=q)"], "aba cdc cda", f"{REDACTED} {REDACTED} cda"),
        (["abc", "bcd", "c"], "abcde", f"{REDACTED}e"),
        (["x*", "y"], "axxby", f"a{REDACTED}b{REDACTED}"),
    ],
)
def test_patterns_do_not_affect_each_other(patterns, text, left):
    assert Redactor(patterns).text(text) == left


def test_a_longer_secret_goes_first():
    assert Redactor(secrets=["abc", "abc.def"]).text("abc.def abcxdef") == f"{REDACTED} {REDACTED}xdef"
