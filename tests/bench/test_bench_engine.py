import json
import math

import pytest

from rollart.backends.engines.checkpoint_config import read_shape
from rollart.backends.models import build_model
from rollart.bench import engine_run as bench_engine_run
from rollart.bench.engine import Bench, Turn, Workload, load_benches
from rollart.bench.engine_run import EngineSide, GenerateSide, measure, recorded_products

CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
SINGLE = Workload(tuple((Turn(3 + index, 4),) for index in range(4)))
MULTI = Workload(((Turn(5, 2), Turn(3, 4)), (Turn(6, 3),)))
FIGURES = {
    "vs_generate_b1",
    "vs_generate_b16",
    "vs_generate_b64",
    "vs_generate_multiturn",
    "limit_share_b64",
    "update_stall_ms",
}


def test_the_committed_sizes_are_what_they_are_called():
    benches = load_benches()
    assert list(benches) == ["1M", "3M", "10M", "50M"]
    for name, bench in benches.items():
        tensors = read_shape({"config": bench.config}).tensors()
        parameters = sum(math.prod(size) for tensor, size in tensors.items() if tensor != "lm_head.weight")
        assert parameters == pytest.approx(float(name.removesuffix("M")) * 1e6, rel=0.15)
        assert len(bench.single.trajectories) == len(bench.multi.trajectories) == 64
    for turns in benches["1M"].multi.trajectories:
        assert 2 <= len(turns) <= 8
        assert turns[0].new == 60
        assert all(20 <= turn.new <= 40 for turn in turns[1:])
        assert all(4 <= turn.answer <= 16 for turn in turns)


def test_all_figures_of_a_size(monkeypatch):
    monkeypatch.setattr(bench_engine_run, "BANDWIDTH_BYTES", 2**20)
    monkeypatch.setattr(bench_engine_run, "UPDATE_ANSWER", 60)
    figures = measure(Bench("tiny", CONFIG, 2, SINGLE, MULTI), lambda _: None, None)
    assert set(figures) >= FIGURES
    assert "vs_vllm_b64" not in figures
    assert all(figures[name] > 0 for name in FIGURES - {"update_stall_ms"})
    json.dumps(figures)


def test_both_sides_generate_the_tokens_of_the_workload():
    model = build_model({"config": CONFIG}, dtype="float32", device="cpu")
    side = EngineSide(Bench("tiny", CONFIG, 1, SINGLE, MULTI), model)
    side.run(MULTI)
    counted = side._engine.counters().tasks["bench"]
    assert counted.decode_tokens == MULTI.tokens == 9
    GenerateSide(model).run(MULTI)


def test_every_product_of_a_run_is_recorded():
    model = build_model({"config": CONFIG}, dtype="float32", device="cpu")
    side = EngineSide(Bench("tiny", CONFIG, 1, SINGLE, MULTI), model)
    with recorded_products() as products, side.kv_reads() as read:
        side.run(Workload(((Turn(5, 1),),)))
    # One step: two layers of four products and the head; the last layer goes on with one row.
    rows = [product.rows for product in products]
    assert rows == [5, 5, 5, 5, 5, 1, 1, 1, 1]
    assert read == [2 * 2 * 5 * 2 * 16 * 4]  # keys and values of two layers, five tokens, two heads of 16 numbers
