"""Text of an answer in pieces: nothing lost, nothing cut, nothing past a stop string."""

from hypothesis import given
from hypothesis import strategies as st

from rollart.gateway.text_stream import TextStream

LETTERS = st.text(alphabet="ab€é\N{GRINNING FACE}", max_size=40)


def decode(tokens):
    return bytes(tokens).decode(errors="replace")


def pieces(data, cuts, stops=()):
    """What a stream gives for bytes that arrive in batches; cut by cut, then the rest."""
    stream = TextStream(decode, stops)
    out, start = [], 0
    for stop in [*sorted(min(cut, len(data)) for cut in cuts), len(data)]:
        out.append(stream.feed(data[start:stop]))
        start = stop
    return [*out, stream.finish()], stream.stopped


@given(LETTERS, st.lists(st.integers(0, 120), max_size=20))
def test_the_pieces_are_the_text(text, cuts):
    found, stopped = pieces(text.encode(), cuts)
    assert "".join(found) == text
    assert not any("�" in piece for piece in found)
    assert not stopped


@given(st.binary(max_size=40), st.lists(st.integers(0, 40), max_size=20))
def test_bytes_that_are_no_text_are_decoded_as_a_whole(data, cuts):
    found, _ = pieces(data, cuts)
    assert "".join(found) == decode(data)


@given(LETTERS, st.lists(st.integers(0, 120), max_size=20), st.lists(LETTERS.filter(bool), min_size=1, max_size=4))
def test_the_text_ends_before_the_first_stop_string(text, cuts, stops):
    ends = [(place + len(stop), place) for stop in stops if (place := text.find(stop)) >= 0]
    found, stopped = pieces(text.encode(), cuts, stops)
    assert stopped == bool(ends)
    assert "".join(found) == (text[: min(ends)[1]] if ends else text)


def test_the_stop_string_that_is_complete_first_counts():
    for cuts in ((), range(4)):
        found, _ = pieces(b"abcd", cuts, ("abcd", "c"))
        assert "".join(found) == "ab"


def test_a_token_without_text_starts_no_text():
    """Some decoders strip the blank of a text's first word."""
    words = ["", "A", " B"]
    stream = TextStream(lambda ids: "".join(words[id] for id in ids).lstrip())
    assert [stream.feed([id]) for id in (1, 0, 2)] == ["A", "", " B"]


def test_what_may_become_a_stop_string_is_held_back():
    stream = TextStream(decode, ("STOP",))
    assert [stream.feed(part) for part in (b"a S", b"T", b"OMP", b" ST", b"OP b", b"c")] == [
        "a ",
        "",
        "STOMP",
        " ",
        "",
        "",
    ]
    assert (stream.finish(), stream.stopped) == ("", True)
    held = TextStream(decode, ("STOP",))
    assert (held.feed(b"a STO"), held.finish(), held.stopped) == ("a ", "STO", False)
