"""The decoder computes what transformers computes, however the tokens are cut, packed and kept."""

import numpy as np
import pytest
import torch
from decoder_parts import BASE, VOCABULARY, Bench, hub_logits, hub_model, relative

from rollart.backends.engines.checkpoint_config import read_shape
from rollart.backends.engines.decoder import Decoder
from rollart.backends.engines.weights import prepare_now
from rollart.types.errors import RequestError, WeightError

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 2.0, "original_max_position_embeddings": 32}
MODELS = {
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "qwen3-tied": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
    "qwen3-bias": {"model_type": "qwen3", "head_dim": 16, "attention_bias": True},
    "qwen2": {"model_type": "qwen2"},
    "qwen2-tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "llama": {"model_type": "llama"},
    "llama-bias": {"model_type": "llama", "attention_bias": True},
    "llama-no-groups": {"model_type": "llama", "num_key_value_heads": 6},
    "llama-one-kv-head": {"model_type": "llama", "num_key_value_heads": 1},
    "llama3-rope": {"model_type": "llama", "rope_parameters": LLAMA3},
    "yarn": {"model_type": "qwen3", "head_dim": 16, "rope_parameters": YARN},
    "yarn-scaled": {
        "model_type": "qwen2",
        "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2, "beta_fast": 16, "truncate": False},
    },
    "yarn-factor": {"model_type": "llama", "rope_parameters": {**YARN, "attention_factor": 0.9}},
    "linear": {"model_type": "qwen2", "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}},
    "dynamic": {"model_type": "llama", "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0}},
}
TOLERANCE = 1e-4

pytestmark = pytest.mark.usefixtures("maths")


def sequences(count=4, low=8, high=60):
    random = np.random.default_rng(3)
    return [random.integers(0, VOCABULARY, random.integers(low, high)).astype(np.int32) for _ in range(count)]


@pytest.fixture(params=MODELS)
def config(request):
    return {**BASE, **MODELS[request.param]}


def test_logits_are_those_of_transformers(config):
    model = hub_model(config)
    bench = Bench(config, model)
    for name, tokens in enumerate(sequences()):
        want = hub_logits(model, tokens)
        assert relative(bench.feed({name: tokens})[name], want[-1]) < TOLERANCE
        # And token by token, as in decoding.
        for position, token in enumerate(tokens):
            got = bench.feed({100 + name: np.array([token])})[100 + name]
            assert relative(got, want[position]) < TOLERANCE


def test_cut_packed_and_interleaved_as_it_may_be(config):
    """Batched against single, chunked against whole, KV that is reused against fresh: all against transformers."""
    model = hub_model(config)
    bench = Bench(config, model)
    random = np.random.default_rng(0)
    tokens = sequences(6)
    wanted = [hub_logits(model, sequence) for sequence in tokens]
    done = [0] * len(tokens)
    while any(done[index] < len(tokens[index]) for index in range(len(tokens))):
        parts = {}
        for index in random.permutation(len(tokens)):
            left = len(tokens[index]) - done[index]
            if left and random.random() < 0.8:
                count = 1 if random.random() < 0.6 else int(random.integers(1, left + 1))
                parts[int(index)] = tokens[index][done[index] : done[index] + count]
        for index, logits in (bench.feed(parts) if parts else {}).items():
            done[index] += len(parts[index])
            assert relative(logits, wanted[index][done[index] - 1]) < TOLERANCE


def test_beside_others_as_alone(config, maths):
    """By the native kernels to the last bit."""
    model = hub_model(config)
    tokens = sequences(9)
    alone = Bench(config, model)
    together = Bench(config, model)
    for parts in (
        {index: each[:-1] for index, each in enumerate(tokens)},
        dict(enumerate(each[-1:] for each in tokens)),
    ):
        got = together.feed(parts)
        for index, part in parts.items():
            want = alone.feed({index: part})[index]
            assert relative(got[index], want) < (1e-12 if maths == "native" else TOLERANCE)


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_other_weights_need_other_kv(family):
    config = {**BASE, **MODELS[family]}
    first, second = hub_model(config, 1), hub_model(config, 2)
    bench = Bench(config, first)
    tokens = sequences(1)[0]
    assert relative(bench.feed({0: tokens})[0], hub_logits(first, tokens)[-1]) < TOLERANCE
    bench.load(second)
    bench.done[0] = 0
    assert relative(bench.feed({0: tokens})[0], hub_logits(second, tokens)[-1]) < TOLERANCE


def test_freed_memory_holds_nothing_of_before():
    config = {**BASE, **MODELS["qwen3"]}
    model = hub_model(config)
    bench = Bench(config, model)
    long, short = sequences(2, 50, 60)[0], sequences(1, 5, 6)[0]
    bench.feed({0: long, 1: long})
    bench.drop(0)
    want = hub_logits(model, short)
    bench.feed({2: short[:3]})
    for position in (3, 4):
        got = bench.feed({1: long[:1], 2: short[position : position + 1]})[2]
        assert relative(got, want[position]) < TOLERANCE


def test_long_chunks_are_attended_to_in_parts(monkeypatch):
    monkeypatch.setattr("rollart.backends.engines.torch_step.MAX_SCORES", 6 * 60 * 7)
    config = {**BASE, **MODELS["llama"]}
    model = hub_model(config)
    bench = Bench(config, model)
    tokens = sequences(1, 58, 60)[0]
    bench.feed({0: tokens[:20]})
    assert relative(bench.feed({0: tokens[20:]})[0], hub_logits(model, tokens)[-1]) < TOLERANCE


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_bfloat16_is_as_close_as_its_rounding(family):
    config = {**BASE, **MODELS[family], "initializer_range": 0.1}
    exact = hub_model(config)
    bench = Bench(config, exact, torch.bfloat16)
    rounded = exact.to(torch.bfloat16)
    tokens = sequences(1)[0]
    theirs = hub_logits(rounded, tokens)[-1]
    want = hub_logits(rounded.float(), tokens)[-1]
    assert relative(bench.feed({0: tokens})[0], want) < max(0.02, 2 * relative(theirs, want))


def test_dynamic_rope_has_no_kept_keys_past_its_length():
    shape = read_shape({"config": {**BASE, **MODELS["dynamic"]}})
    with pytest.raises(RequestError, match="max_context to at most 64"):
        Decoder(shape, dtype=torch.float32, device=torch.device("cpu"), max_context=65)


def test_weights_that_cannot_be_served():
    config = {**BASE, **MODELS["qwen3-tied"]}
    shape = read_shape({"config": config})
    tensors = dict(hub_model(config).state_dict())

    def make(**changes):
        renamed = {name.replace("__", "."): tensor for name, tensor in changes.items()}
        return prepare_now({**tensors, **renamed}, shape, dtype=torch.float32, device=torch.device("cpu"))

    with pytest.raises(WeightError, match="non-finite"):
        make(model__norm__weight=torch.full((48,), float("nan")))
    with pytest.raises(WeightError, match="two different tensors"):
        make(lm_head__weight=torch.zeros(VOCABULARY, 48))
