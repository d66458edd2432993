"""A packed row gives what its sequences give one by one: logits, losses and gradients."""

import pytest
import torch
from packed_parts import branching, samples
from parts import TINY, VOCABULARY

from rollart.backends.models import build_model, token_logprobs
from rollart.backends.trainers import packed_attention
from rollart.backends.trainers.packed_model import PackedModel, pack_row
from rollart.backends.trainers.packing import items, micro_batches
from rollart.types.errors import RequestError

TOLERANCE = {"float32": 2e-5, "float64": 2e-6}  # the norms of these models compute in float32 in any case

pytestmark = pytest.mark.usefixtures("maths")


def model(kind="qwen3", *, tied=True, dtype="float32", **options):
    config = TINY["config"] | {"model_type": kind, "tie_word_embeddings": tied} | options
    return build_model({"config": config}, dtype=dtype, device="cpu", seed=3)


def gradients(model):
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(gradient is not None for gradient in found.values())
    return found


def directions(rows, dtype):
    """For every sequence a random weight of each of its logits."""
    generator = torch.Generator().manual_seed(5)
    return {
        row.trajectory: torch.randn(row.targets.size, VOCABULARY, generator=generator, dtype=torch.float64).to(dtype)
        for row in rows
    }


def one_by_one(model, rows, weights):
    """With the model's own attention: (logits by trajectory), and the gradient of their weighted sum in the model."""
    logits = {}
    for sample in samples():
        if sample.masked:
            continue
        (log,) = sample.sequences
        ids = torch.tensor(log.whole().ids()).long()
        every = model(ids[None, :-1], use_cache=False).logits[0][torch.tensor(log.action_mask()[1:])]
        (every * weights[sample.trajectory]).sum().backward()
        logits[sample.trajectory] = every.detach()
    assert set(logits) == {row.trajectory for row in rows}
    return logits


def in_rows(packed, batches, weights):
    logits = {}
    for batch in batches:
        found = packed.logits(pack_row(batch, torch.device("cpu")))
        wanted = torch.cat([weights[item.trajectory] for item in batch.items])
        (found * wanted).sum().backward()
        parts = found.detach().split([item.targets.size for item in batch.items])
        logits |= {item.trajectory: part for item, part in zip(batch.items, parts, strict=True)}
    return logits


def assert_alike(left, right, tolerance):
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        scale = tensor.abs().max().clamp(min=1e-3)
        assert ((tensor - right[name]).abs().max() / scale).item() <= tolerance, name


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("budget", "share"), [(10_000, False), (10_000, True), (40, True), (1, False)])
def test_packed_is_one_by_one(dtype, kind, tied, budget, share):
    rows = items(samples(), VOCABULARY)
    alone, together = model(kind, tied=tied, dtype=dtype), model(kind, tied=tied, dtype=dtype)
    weights = directions(rows, alone.dtype)
    batches = micro_batches(rows, budget, share=share)
    expected = one_by_one(alone, rows, weights)
    found = in_rows(PackedModel(together), batches, weights)
    assert_alike(expected, found, TOLERANCE[dtype])
    assert_alike(gradients(alone), gradients(together), TOLERANCE[dtype])


def test_long_rests_are_computed_in_chunks(monkeypatch):
    monkeypatch.setattr(packed_attention, "CHUNK_TOKENS", 4)
    monkeypatch.setattr(packed_attention, "MASKS_KEPT", 2)
    test_packed_is_one_by_one("float32", "qwen3", True, 10_000, True)


def test_a_shared_prompt_collects_the_gradients_of_all(monkeypatch, maths):
    rows = items(samples(), VOCABULARY)
    calls = []
    attention = packed_attention.scaled_dot_product_attention
    monkeypatch.setattr(
        packed_attention,
        "scaled_dot_product_attention",
        lambda query, *rest, **options: calls.append(query.shape[2]) or attention(query, *rest, **options),
    )
    shared, apart = model(), model()
    packed = PackedModel(shared)
    calls.clear()
    weights = directions(rows, torch.float32)
    in_rows(packed, micro_batches(rows, 10_000), weights)
    if maths == "torch":
        assert calls.count(17) == TINY["config"]["num_hidden_layers"]  # the prompt of four, once in every layer
    in_rows(PackedModel(apart), micro_batches(rows, 10_000, share=False), weights)
    assert_alike(gradients(apart), gradients(shared), 2e-5)


@pytest.mark.parametrize("budget", [10_000, 90, 60])
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_sequences_that_part_on_the_way(kind, budget, kv_heads):
    rows = items(branching(), VOCABULARY)
    weights = directions(rows, torch.float32)
    shared, apart = (model(kind, num_key_value_heads=kv_heads) for _ in range(2))
    found = in_rows(PackedModel(shared), micro_batches(rows, budget), weights)
    expected = in_rows(PackedModel(apart), micro_batches(rows, 1, share=False), weights)
    assert_alike(expected, found, 2e-5)
    assert_alike(gradients(apart), gradients(shared), 2e-5)


def test_checkpointed_layers_give_the_same_gradients():
    rows = items(samples(), VOCABULARY)
    weights = directions(rows, torch.float32)
    plain, lean = model(), model()
    in_rows(PackedModel(plain), micro_batches(rows, 64), weights)
    packed = PackedModel(lean, gradient_checkpointing=True)
    seen = []
    lean.model.layers[0].self_attn.register_forward_hook(lambda *_: seen.append(1))
    in_rows(packed, micro_batches(rows, 10_000), weights)
    assert len(seen) == 2  # once more in the backward pass
    assert_alike(gradients(plain), gradients(lean), 2e-5)


def test_only_action_tokens_go_through_the_last_mlp_and_the_head():
    rows = items(samples(), VOCABULARY)
    packed = PackedModel(model())
    seen = []
    layers = packed.model.model.layers
    for part in (layers[0].mlp.down_proj, layers[-1].mlp.down_proj, packed.model.lm_head):
        part.register_forward_hook(lambda _module, inputs, _output: seen.append(inputs[0].shape[1]))
    (batch,) = micro_batches(rows, 10_000)
    scores = packed.scores(batch, entropy=True)
    row = pack_row(batch, torch.device("cpu"))
    actions = sum(row.targets.size for row in rows)
    assert seen == [row.tokens.numel(), row.keep.unique().numel(), actions]
    assert seen[0] > seen[1]
    assert scores.logprobs.numel() == actions
    logits = packed.logits(row)
    assert torch.equal(scores.logprobs, token_logprobs(logits, row.targets, 1.0))
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(scores.entropy, entropy)


def test_bfloat16_is_near():
    rows = items(samples(), VOCABULARY)
    (batch,) = micro_batches(rows, 10_000)
    exact = PackedModel(model()).scores(batch).logprobs
    near = PackedModel(model(), compute=torch.bfloat16).scores(batch).logprobs
    assert near.dtype == torch.float32
    assert 1e-6 < (near - exact).abs().mean().item() < 0.1


@pytest.mark.parametrize(
    ("kind", "options", "why"),
    [
        ("mistral", {"sliding_window": 4}, "MistralForCausalLM .*sliding_window"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}, "Qwen2.*sliding_window"),
        ("gemma2", {"head_dim": 16}, "Gemma2ForCausalLM .*softcap"),
        ("bloom", {"n_head": 2, "n_layer": 2}, "BloomForCausalLM .*0 of its 2 layers.*llama, qwen2, qwen3"),
    ],
)
def test_models_whose_attention_is_another_are_refused_by_name(kind, options, why):
    with pytest.raises(RequestError, match=why):
        PackedModel(model(kind, **options))


@pytest.mark.parametrize("kind", ["mistral", "olmo2", "gpt2"])
def test_others_are_taken_if_they_give_the_same(kind):
    packed = PackedModel(model(kind, sliding_window=None))
    (batch,) = micro_batches(items(samples(), VOCABULARY), 10_000)
    assert packed.scores(batch).logprobs.isfinite().all()


def test_a_model_that_looks_elsewhere_is_noticed(monkeypatch):
    """One that takes our attention and still is not the same, because of what it does with positions, say."""
    broken = model()
    forward = broken.model.rotary_emb.forward
    monkeypatch.setattr(broken.model.rotary_emb, "forward", lambda x, *_: forward(x, torch.arange(x.shape[1])[None]))
    with pytest.raises(RequestError, match="differ by"):
        PackedModel(broken)
