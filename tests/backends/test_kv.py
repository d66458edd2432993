import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollart.backends.engines.checkpoint_config import read_shape
from rollart.backends.engines.kv import UNIT_TOKENS, BlockAllocator, KvArena
from rollart.types.errors import InvariantBroken

SHAPE = read_shape({"config": {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}})


@given(units=st.integers(1, 300), steps=st.lists(st.tuples(st.booleans(), st.integers(1, 70)), max_size=120))
def test_blocks_never_overlap_and_none_is_lost(units, steps):
    allocator = BlockAllocator(units)
    held = {}
    for give, number in steps:
        if give and held:
            allocator.release(sorted(held)[number % len(held)])
            del held[sorted(held)[number % len(held)]]
        else:
            place = allocator.allocate(number)
            if place is not None:
                assert place not in held
                held[place] = number
        allocator.check()
        assert allocator.used == sum(held.values())
    for place in held:
        allocator.release(place)
    allocator.check()
    assert allocator.allocate(allocator.largest) == 0


def test_blocks_of_one_size_lie_side_by_side():
    allocator = BlockAllocator(1024)
    small, large = [], []
    for _ in range(16):
        small.append(allocator.allocate(2))
        large.append(allocator.allocate(3))
    assert small == list(range(small[0], small[0] + 32, 2))
    assert large == list(range(large[0], large[0] + 48, 3))


def test_a_lost_block_is_noticed():
    allocator = BlockAllocator(8)
    allocator.allocate(1)
    allocator._free[2].clear()
    with pytest.raises(InvariantBroken):
        allocator.check()


def arena(tokens, dtype=torch.float32):
    budget = tokens * 2 * SHAPE.layers * SHAPE.kv_heads * SHAPE.head_dim * dtype.itemsize
    return KvArena(SHAPE, budget_bytes=budget, dtype=dtype, device=torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_budget_is_what_is_taken(dtype):
    kv = arena(5 * UNIT_TOKENS, dtype)
    assert kv.tokens == 5 * UNIT_TOKENS
    assert kv.keys.nbytes + kv.values.nbytes == kv.tokens * kv.token_bytes
    assert kv.largest_tokens == 4 * UNIT_TOKENS
    assert kv.allocate(4 * UNIT_TOKENS + 1) is None
    block = kv.allocate(UNIT_TOKENS + 1)
    assert block.capacity == 2 * UNIT_TOKENS


@pytest.mark.usefixtures("maths")
def test_a_copy_has_the_same_keys_and_values():
    kv = arena(16 * UNIT_TOKENS)
    source, target = kv.allocate(UNIT_TOKENS), kv.allocate(2 * UNIT_TOKENS)
    keys, values = kv.run(source.offset, source.capacity, 1, 9)
    for tensor in (*keys, *values):
        tensor.normal_()
    kv.copy(source, target, 4, 9)
    copied_keys, copied_values = kv.run(target.offset, target.capacity, 1, 9)
    for copied, original in ((copied_keys, keys), (copied_values, values)):
        for a, b in zip(copied, original, strict=True):
            at = a.shape.index(9)
            assert torch.equal(a.narrow(at, 4, 5), b.narrow(at, 4, 5))
            assert not a.narrow(at, 0, 4).any()
