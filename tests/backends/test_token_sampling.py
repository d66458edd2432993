import math

import numpy as np
import pytest
import torch
from transformers import TopKLogitsWarper, TopPLogitsWarper

from rollart.backends.engines.token_sampling import draws, sample
from rollart.types.messages import Sampling

pytestmark = pytest.mark.usefixtures("maths")


def logits(rows=4, vocabulary=101, seed=0):
    return 3 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))


def many(row, sampling, count):
    """`count` draws from one distribution."""
    samplings = [Sampling(1, sampling.temperature, (), seed, sampling.top_p, sampling.top_k) for seed in range(count)]
    return sample(row.expand(count, -1).clone(), samplings, [5] * count)


def test_draws_depend_on_seed_and_position_alone():
    assert draws([1, 2, 3], [7, 7, 9])[1] == draws([2], [7])[0]
    assert draws([-1], [0]) == draws([2**64 - 1], [0])
    uniform = draws(range(20_000), [3] * 20_000)
    assert uniform.min() >= 0
    assert uniform.max() < 1
    assert np.histogram(uniform, bins=20, range=(0, 1))[0] == pytest.approx([1000] * 20, abs=150)
    along = draws([11] * 20_000, range(20_000))
    assert np.histogram(along, bins=20, range=(0, 1))[0] == pytest.approx([1000] * 20, abs=150)
    assert abs(np.corrcoef(along[:-1], along[1:])[0, 1]) < 0.03


@pytest.mark.parametrize("vocabulary", [3, 64, 101, 256])
@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_tokens_follow_the_softmax(vocabulary, temperature):
    row = logits(1, vocabulary)
    count = 20_000
    tokens = many(row, Sampling(1, temperature), count).tokens
    want = torch.softmax(row[0] / temperature, -1).numpy()
    got = np.bincount(tokens, minlength=vocabulary) / count
    assert np.abs(got - want).max() < 0.015


@pytest.mark.parametrize("sampling", [Sampling(1, 0.7), Sampling(1, 0.0), Sampling(1, 1.3, top_k=3, top_p=0.5)])
def test_the_logprob_is_that_of_the_full_softmax(sampling):
    rows = logits(50)
    out = sample(rows.clone(), [sampling] * 50, list(range(50)))
    want = torch.log_softmax(rows / (sampling.temperature or 1.0), -1)
    np.testing.assert_allclose(out.logprobs, want[torch.arange(50), torch.from_numpy(out.tokens).long()], atol=1e-5)


def test_greedy_is_the_likeliest():
    rows = logits(8)
    mixed = [Sampling(1, 0.0) if row % 2 else Sampling(1, 1.0) for row in range(8)]
    assert sample(rows.clone(), mixed, [0] * 8).tokens[1::2].tolist() == rows.argmax(-1)[1::2].tolist()


@pytest.mark.parametrize(("top_k", "top_p"), [(4, 1.0), (0, 0.6), (10, 0.5), (1, 1.0), (0, 1e-9), (500, 0.9)])
def test_the_cut_set_is_that_of_transformers(top_k, top_p):
    row = logits(1)
    kept = TopKLogitsWarper(top_k)(None, row.clone()) if top_k else row.clone()
    kept = TopPLogitsWarper(top_p)(None, kept) if top_p < 1 else kept
    want = torch.softmax(kept, -1)[0].numpy()
    count = 4000
    tokens = many(row, Sampling(1, top_k=top_k, top_p=top_p), count).tokens
    assert set(tokens.tolist()) <= set(np.flatnonzero(want).tolist())
    assert np.abs(np.bincount(tokens, minlength=101) / count - want).max() < 0.04


def test_a_row_does_not_depend_on_its_batch():
    rows = logits(16)
    samplings = [Sampling(1, 0.5 + row / 10, seed=row, top_k=row % 3) for row in range(16)]
    together = sample(rows.clone(), samplings, list(range(16)))
    for row in range(16):
        alone = sample(rows[row : row + 1].clone(), [samplings[row]], [row])
        assert alone.tokens[0] == together.tokens[row]
        assert alone.logprobs[0] == pytest.approx(together.logprobs[row], abs=1e-6)


def test_no_token_of_probability_zero_is_taken():
    row = torch.full((1, 130), -math.inf)
    row[0, 70] = 1.0
    assert set(many(row, Sampling(1), 500).tokens.tolist()) == {70}
    assert set(many(row, Sampling(1, top_k=5), 500).tokens.tolist()) == {70}
