import pytest

from rollart.tasks.prompts import SeedPrompts
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


def test_a_source_asks_for_its_side():
    assert SeedPrompts("t", 0, 3).next().data == {}
    assert SeedPrompts("t", 0, 3, held_out=True).next().data == {"held_out": True}
    train = SeedPrompts("t", 0, 3, held_out=False)
    with pytest.raises(RequestError, match="another prompt source"):
        train.seek(SeedPrompts("t", 0, 3, held_out=True).cursor())
    with pytest.raises(RequestError, match="another prompt source"):
        SeedPrompts("t", 0, 3).seek(train.cursor())


def test_an_empty_range_is_refused():
    with pytest.raises(RequestError, match="count"):
        SeedPrompts("t", 0, 0)
