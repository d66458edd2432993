"""The roofline against the paper's data sheet and measurements (`paper-facts`)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.sim.hardware import (
    FAST,
    H20,
    H800,
    HARDWARE,
    MODELS,
    QWEN3_8B,
    QWEN3_14B,
    QWEN3_32B,
    TINY,
    WIDE,
    Hardware,
    ModelProfile,
    Roofline,
)
from rollart.types.errors import RequestError

TOKENS = st.integers(0, 100_000)


@pytest.mark.parametrize(("model", "gib"), [(QWEN3_8B, 15.26), (QWEN3_14B, 27.51), (QWEN3_32B, 61.02)])
def test_weights_have_the_papers_size(model: ModelProfile, gib: float) -> None:
    assert model.weight_bytes / 2**30 == pytest.approx(gib, abs=0.01)


def test_prefill_goes_by_arithmetic() -> None:
    ratio = Roofline(H20, QWEN3_8B).prefill_s(8_000, 2_000) / Roofline(H800, QWEN3_8B).prefill_s(8_000, 2_000)
    assert ratio == pytest.approx(989.5 / 148.0, rel=1e-6)


def test_decode_goes_by_bandwidth() -> None:
    """While bandwidth binds: at 500 tokens each, arithmetic binds the H20 and the H800 wins from batch 38 on."""
    h20, h800 = (Roofline(hardware.model_copy(update={"step_overhead_s": 0.0}), QWEN3_8B) for hardware in (H20, H800))
    ratio = h800.decode_step_s(16, 16 * 8_000) / h20.decode_step_s(16, 16 * 8_000)
    assert ratio == pytest.approx(4.0 / 3.35, rel=1e-6)
    assert Roofline(H20, QWEN3_8B).decode_step_s(16, 128_000) < Roofline(H800, QWEN3_8B).decode_step_s(16, 128_000)


@pytest.mark.parametrize(("prompt", "answer", "best"), [(4_000, 100, "H800"), (300, 6_000, "H20")])
def test_at_equal_cost_each_class_wins_its_own_kind(prompt: int, answer: int, best: str) -> None:
    """2 H800 against 6 H20, lengths of our own: the direction of the paper's table, not its figures."""
    seconds = {}
    for hardware, devices in ((H800, 2), (H20, 6)):
        roofline = Roofline(hardware, QWEN3_8B)
        batch = 128 // devices
        step_s = roofline.decode_step_s(batch, batch * (prompt + answer / 2))
        seconds[hardware.name] = batch * roofline.prefill_s(prompt, 0) + answer * step_s
    assert min(seconds, key=seconds.__getitem__) == best
    assert 0.3 < min(seconds.values()) / max(seconds.values()) < 0.9


def test_the_laptop_pair_is_unlike_in_the_same_way() -> None:
    fast, wide = Roofline(FAST, TINY), Roofline(WIDE, TINY)
    assert fast.prefill_s(500, 0) < 0.5 * wide.prefill_s(500, 0)
    assert wide.decode_step_s(4, 2_000) < 0.5 * fast.decode_step_s(4, 2_000)
    for batch in range(1, 33):
        assert wide.decode_step_s(batch, batch * 500) < fast.decode_step_s(batch, batch * 500)


def test_kv_memory() -> None:
    # 2 (key, value) · 36 layers · 8 heads · 128 · 2 bytes
    assert QWEN3_8B.kv_bytes_per_token == 147_456
    assert Roofline(H20, QWEN3_8B).kv_capacity_tokens == int((96e9 * 0.9 - QWEN3_8B.weight_bytes) // 147_456)
    assert Roofline(H800, QWEN3_32B, 4).kv_capacity_tokens > 4 * Roofline(H800, QWEN3_32B).kv_capacity_tokens
    with pytest.raises(RequestError, match="more ranks"):
        _ = Roofline(FAST, QWEN3_8B).kv_capacity_tokens
    with pytest.raises(RequestError, match="at least 1 rank"):
        Roofline(FAST, QWEN3_8B, 0)


def test_training_is_a_lower_bound_of_what_the_paper_measured() -> None:
    """8B, 32 H800, batch 128: training was 23.1 % of 365.7 s. The mean length is not given, the longest is 32k.

    With every trajectory at its longest we say 21.7 s, 3.9 times less. The bound holds; the time is not reproduced.
    """
    roofline = Roofline(H800, QWEN3_8B, 32)
    longest = 128 * 32_768
    ours = roofline.train_s(longest) + roofline.forward_s(longest)
    assert ours == pytest.approx(21.7, abs=0.1)
    assert ours < 0.231 * 365.7
    assert roofline.forward_s(longest) == pytest.approx(roofline.train_s(longest) / 3)


@pytest.mark.parametrize(
    ("gb_s", "measured"),
    [(2.2, (6.911, 14.437, 29.649)), (0.49, (32.4, 67.8, 127.3))],
    ids=["TCP", "push to the store"],
)
def test_one_rate_explains_three_models(gb_s: float, measured: tuple[float, ...]) -> None:
    """A link is a rate and nothing else: true of these two, not of RDMA, where a fixed part shows."""
    for model, seconds in zip((QWEN3_8B, QWEN3_14B, QWEN3_32B), measured, strict=True):
        assert Roofline.transfer_s(model.weight_bytes, gb_s) == pytest.approx(seconds, rel=0.13)


@pytest.mark.parametrize("hardware", HARDWARE.values(), ids=list(HARDWARE))
@pytest.mark.parametrize("model", MODELS.values(), ids=list(MODELS))
@pytest.mark.parametrize("ranks", [1, 4])
@given(new=st.integers(1, 50_000), context=TOKENS, batch=st.integers(1, 512), kv=TOKENS, more=st.integers(1, 10_000))
def test_more_work_takes_longer(
    hardware: Hardware, model: ModelProfile, ranks: int, new: int, context: int, batch: int, kv: int, more: int
) -> None:
    roofline = Roofline(hardware, model, ranks)
    assert 0 < roofline.prefill_s(new, context) < roofline.prefill_s(new + more, context)
    assert roofline.prefill_s(new, context) < roofline.prefill_s(new, context + more)
    assert 0 < roofline.decode_step_s(batch, kv) <= roofline.decode_step_s(batch + more, kv)
    assert roofline.decode_step_s(batch, kv) < roofline.decode_step_s(batch, kv + more)
    cut = roofline.prefill_s(new, context) + roofline.prefill_s(more, context + new)
    assert cut == pytest.approx(roofline.prefill_s(new + more, context)), "prefill in two parts is as much work"
