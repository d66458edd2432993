"""Off-policy corrections and the mismatch of engine and trainer."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollart.algo.correction import correction_weights, mismatch
from rollart.algo.metrics import Metrics
from rollart.config.algorithm import CorrectionKind, CorrectionLevel, CorrectionSettings

RATIOS = [0.25, 1.0, 1.5, 4.0, 2.0]
SEQUENCE = torch.tensor([0, 0, 0, 1, 1])
PROXIMAL = torch.tensor([math.log(ratio) for ratio in RATIOS])
BEHAVIOUR = torch.zeros(5)


def weights(kind, level="token", **settings):
    given = CorrectionSettings(kind=kind, level=level, **settings)
    out, metrics = correction_weights(given, PROXIMAL, BEHAVIOUR, SEQUENCE, 2)
    return out.tolist(), (metrics + Metrics({"tokens": torch.tensor(5.0)})).summary()


def test_none():
    assert weights("none")[0] == [1.0] * 5


def test_truncated_per_token():
    out, summary = weights("truncate", cap=2.0)
    assert out == pytest.approx([0.25, 1.0, 1.5, 2.0, 2.0])
    assert summary["correction_high"] == pytest.approx(1 / 5)
    assert summary["correction_weight"] == pytest.approx(6.75 / 5)


def test_masked_per_token_on_both_sides():
    out, summary = weights("mask", cap=3.0, floor=0.5)
    assert out == pytest.approx([0.0, 1.0, 1.5, 0.0, 2.0])
    assert summary["correction_high"] == summary["correction_low"] == pytest.approx(1 / 5)


def test_per_sequence():
    assert weights("truncate", "sequence", cap=5.0)[0] == pytest.approx([0.375] * 3 + [5.0] * 2)
    assert weights("mask", "sequence", cap=5.0)[0] == pytest.approx([0.375] * 3 + [0.0] * 2)


def test_geometric():
    first, second = 0.375 ** (1 / 3), math.sqrt(8.0)
    assert weights("truncate", "geometric", cap=5.0)[0] == pytest.approx([first] * 3 + [second] * 2)
    assert weights("mask", "geometric", cap=2.0)[0] == pytest.approx([first] * 3 + [0.0] * 2)


def test_an_exact_weight_makes_any_sample_count_as_if_the_policy_had_drawn_it():
    """Σ_a π_b(a) · (π / π_b)(a) · f(a) = Σ_a π(a) f(a): the estimate is unbiased while no weight is cut."""
    behaviour, policy = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.3, 0.3, 0.4])
    values = torch.tensor([1.0, -2.0, 5.0])
    given = CorrectionSettings(kind="truncate", cap=100.0)
    out, _ = correction_weights(given, policy.log(), behaviour.log(), torch.arange(3), 3)
    assert (behaviour * out * values).sum().item() == pytest.approx((policy * values).sum().item())


@pytest.mark.parametrize("level", CorrectionLevel)
@pytest.mark.parametrize("kind", CorrectionKind)
def test_where_both_agree_nothing_is_corrected(kind, level):
    out, _ = correction_weights(CorrectionSettings(kind=kind, level=level), PROXIMAL, PROXIMAL, SEQUENCE, 2)
    assert out.tolist() == [1.0] * 5


logprobs = st.lists(st.floats(-1e4, 0.0), min_size=5, max_size=5)


@given(logprobs, logprobs, st.sampled_from(CorrectionKind), st.sampled_from(CorrectionLevel))
def test_weights_are_finite_constants_within_the_bounds(proximal, behaviour, kind, level):
    given = CorrectionSettings(kind=kind, level=level, cap=3.0)
    trainer = torch.tensor(proximal, requires_grad=True)
    out, _ = correction_weights(given, trainer, torch.tensor(behaviour), SEQUENCE, 2)
    assert not out.requires_grad
    assert ((out >= 0) & (out <= 3)).all()


def summary(trainer, behaviour):
    tokens = Metrics({"tokens": torch.tensor(float(len(trainer)))})
    return (mismatch(torch.tensor(trainer), torch.tensor(behaviour)) + tokens).summary()


def test_the_mismatch_by_hand():
    found = summary([math.log(2.0), 0.0, math.log(0.25)], [0.0, 0.0, 0.0])
    assert found["mismatch"] == pytest.approx((math.log(2.0) + math.log(4.0)) / 3)
    assert found["mismatch_kl"] == pytest.approx((2 - 1 - math.log(2.0) + 0.25 - 1 + math.log(4.0)) / 3)
    assert found["mismatch_ratio"] == pytest.approx(3.25 / 3)
    assert found["max_ratio"] == pytest.approx(4.0)
    assert found["effective_samples"] == pytest.approx(3.25**2 / (3 * (4 + 1 + 1 / 16)))


def test_the_mismatch_of_nothing():
    tokens = Metrics({"tokens": torch.tensor(0.0)})
    assert (mismatch(torch.zeros(0), torch.zeros(0)) + tokens).summary()["mismatch"] == 0


@given(logprobs, logprobs)
def test_the_mismatch_is_finite_and_the_effective_sample_size_a_share(trainer, behaviour):
    found = summary(trainer, behaviour)
    assert all(math.isfinite(value) for value in found.values())
    assert 1 / 5 - 1e-6 <= found["effective_samples"] <= 1 + 1e-6
    assert found["mismatch_kl"] >= -1e-6


def test_the_estimated_divergence_is_that_of_the_distributions():
    behaviour, trainer = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.5, 0.3, 0.2])
    # Every token as often as the behaviour samples it.
    tokens = torch.repeat_interleave(torch.arange(3), torch.tensor([7, 2, 1]))
    found = summary(trainer.log()[tokens].tolist(), behaviour.log()[tokens].tolist())
    assert found["mismatch_kl"] == pytest.approx((behaviour * (behaviour / trainer).log()).sum().item(), abs=1e-6)
    assert found["mismatch_ratio"] == pytest.approx(1.0)
