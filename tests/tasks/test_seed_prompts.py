import pytest

from rollart.tasks.prompts import SeedPrompts, held_out
from rollart.types.errors import RequestError


def seeds(source, count):
    return [source.next().seed for _ in range(count)]


def test_every_pass_has_every_seed_in_an_order_of_its_own():
    source = SeedPrompts("t", 50, 20)
    first, second = seeds(source, 20), seeds(source, 20)
    assert sorted(first) == sorted(second) == list(range(50, 70))
    assert first != second
    assert seeds(SeedPrompts("t", 50, 20, shuffle_seed=1), 20) != first


def test_the_order_is_for_ever():
    assert seeds(SeedPrompts("t", 0, 6), 8) == [0, 4, 2, 3, 5, 1, 3, 2]


def test_a_damaged_cursor_is_refused():
    source = SeedPrompts("t", 0, 3)
    for damage in ({"index": 3}, {"index": None}, {"pass": -1}):
        with pytest.raises(RequestError, match="damaged"):
            source.seek({**source.cursor(), **damage})


def test_what_is_held_out_is_never_trained_on():
    train, evaluate = held_out("t", 10, 100, 20)
    assert sorted(seeds(train, 80)) == list(range(10, 90))
    assert sorted(seeds(evaluate, 20)) == list(range(90, 110))
    for held in (0, 100):
        with pytest.raises(RequestError, match="hold out"):
            held_out("t", 10, 100, held)
    with pytest.raises(RequestError, match="count"):
        SeedPrompts("t", 0, 0)
