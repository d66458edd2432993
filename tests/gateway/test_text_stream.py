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
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    by_token, stopped = pieces(text.encode(), range(120), stops)
    assert stopped == bool(places)
    # Token by token the first string to be complete counts; in batches that may be another, which began before it.
    found, stopped = pieces(text.encode(), cuts, stops)
    assert stopped == bool(places)
    if not places:
        assert "".join(found) == "".join(by_token) == text
    else:
        ends = [place + len(stop) for stop in stops if (place := text.find(stop)) >= 0]
        assert "".join(found) in [text[:place] for place in places]
        assert len("".join(by_token)) <= min(ends)


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
