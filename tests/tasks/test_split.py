import pytest

from rollart.tasks.split import HELD_OUT_SHARE, draw, is_held_out
from rollart.types.errors import RequestError
from rollart.types.trajectory import Prompt


def prompt(seed, **data):
    return Prompt(str(seed), "t", seed, data)


def test_the_sides_are_for_ever():
    assert [number for number in range(20) if is_held_out(str(number))] == [2, 6, 17, 18]


def test_so_many_are_held_out():
    share = sum(is_held_out(str(number)) for number in range(10_000)) / 10_000
    assert abs(share - HELD_OUT_SHARE) < 0.01


def test_a_prompt_gets_what_is_on_its_side():
    for seed in range(50):
        assert is_held_out(draw(prompt(seed, held_out=True), lambda drawn: str(drawn % 97)))
        assert not is_held_out(draw(prompt(seed, held_out=False), lambda drawn: str(drawn % 97)))
        assert draw(prompt(seed), str) == str(seed)


def test_the_first_seed_that_fits_is_taken():
    drawn = []
    draw(prompt(3, held_out=True), lambda seed: drawn.append(seed) or str(seed))
    assert drawn[0] == 3
    assert [is_held_out(str(seed)) for seed in drawn] == [False] * (len(drawn) - 1) + [True]


def test_too_few_contents_are_named():
    with pytest.raises(RequestError, match="too few"):
        draw(prompt(1, held_out=not is_held_out("only")), lambda _: "only")
