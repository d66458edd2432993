"""Losses as a specification: cases by hand, gradients by finite differences, and what holds for every batch."""

import math
from dataclasses import replace

import pytest
import torch
from batches import cut, gradient, packed
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.algo.loss import SURROGATES, kl_estimate, policy_loss, token_shares, value_loss
from rollart.algo.metrics import Metrics
from rollart.config.algorithm import Aggregation, CorrectionSettings, KlEstimator, LossSettings, PolicyLoss

KINDS = [kind.value for kind in PolicyLoss]
LENGTHS = st.lists(st.integers(1, 5), min_size=1, max_size=5)
SEEDS = st.integers(0, 1000)
FULL = {
    "kl_weight": 0.1,
    "entropy_weight": 0.05,
    "correction": CorrectionSettings(kind="truncate", level="sequence", cap=1.2),
}
"""Everything a loss can have."""


def close(left, right):
    torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-12)


def test_every_kind_has_its_function():
    assert set(SURROGATES) == set(PolicyLoss)


# --- by hand


def test_ppo_by_hand():
    batch = packed(
        [3],
        logprobs=[-1.0, -2.0, -0.5],
        behaviour=[-1.0, -2.5, -0.1],
        proximal=None,
        advantages=[2.0, 2.0, 2.0],
    )
    ratios = [1.0, math.exp(0.5), math.exp(-0.4)]
    loss, metrics = policy_loss(LossSettings(clip_low=0.2, clip_high=0.2), batch)
    assert loss.item() == pytest.approx(-2.0 * (1.0 + 1.2 + ratios[2]) / 3)
    # The clipped token has no gradient.
    assert gradient(loss, batch).tolist() == pytest.approx([-2.0 / 3, 0.0, -2.0 * ratios[2] / 3])
    summary = metrics.summary()
    assert summary["tokens"] == 3
    assert summary["ratio_mean"] == pytest.approx(sum(ratios) / 3)
    assert summary["mismatch"] == pytest.approx(0.9 / 3)
    assert summary["clipped_high"] == pytest.approx(1 / 3)
    assert summary["clipped_low"] == 0
    down, metrics = policy_loss(LossSettings(), replace(batch, advantages=-batch.advantages))
    assert down.item() == pytest.approx(2.0 * (1.0 + ratios[1] + 0.8) / 3)
    assert metrics.summary()["clipped_low"] == pytest.approx(1 / 3)


def test_clip_higher_lets_a_token_grow_by_more_than_it_may_shrink():
    batch = packed([1], logprobs=[math.log(1.25)], behaviour=[0.0], proximal=None, advantages=[1.0])
    assert gradient(policy_loss(LossSettings(clip_high=0.2), batch)[0], batch).item() == 0
    assert gradient(policy_loss(LossSettings(clip_high=0.28), batch)[0], batch).item() == pytest.approx(-1.25)


def test_a_token_far_on_the_wrong_side_does_not_outweigh_the_others():
    """It became 1,000 times as likely since it was sampled, and should become less likely."""
    batch = packed(
        [2], logprobs=[0.0, -1.0], behaviour=[-math.log(1000.0), -1.0], proximal=None, advantages=[-1.0, -1.0]
    )
    loss, metrics = policy_loss(LossSettings(dual_clip=3.0), batch)
    assert loss.item() == pytest.approx((3.0 + 1.0) / 2)
    assert gradient(loss, batch).tolist() == pytest.approx([0.0, 0.5])
    assert metrics.summary()["clipped_dual"] == pytest.approx(1 / 2)
    unlimited, metrics = policy_loss(LossSettings(), batch)
    assert gradient(unlimited, batch).tolist() == pytest.approx([500.0, 0.5])
    assert metrics.summary()["clipped_dual"] == 0


def test_dual_clip_is_for_what_should_become_less_likely():
    batch = packed([2], logprobs=[math.log(2.5)] * 2, behaviour=[0.0] * 2, proximal=None, advantages=[1.0, -1.0])
    loss, _ = policy_loss(LossSettings(clip_high=4.0, dual_clip=2.0), batch)
    assert gradient(loss, batch).tolist() == pytest.approx([-1.25, 0.0])


def test_decoupled_ppo_by_hand():
    """The clip sees π_θ / π_prox = 1.1, the weight is π_prox / π_b = 1.5, and their product is never clipped."""
    batch = packed([1], logprobs=[math.log(1.65)], proximal=[math.log(1.5)], behaviour=[0.0], advantages=[1.0])
    settings = LossSettings(correction=CorrectionSettings(kind="truncate", cap=2.0))
    assert policy_loss(settings, batch)[0].item() == pytest.approx(-1.65)
    coupled = policy_loss(LossSettings(), replace(batch, proximal=None))[0]
    assert coupled.item() == pytest.approx(-1.2)
    assert gradient(coupled, batch).item() == 0


def test_gspo_by_hand():
    batch = packed(
        [2, 1], logprobs=[0.1, 0.3, -0.5], behaviour=[0.0, 0.0, 0.0], proximal=None, advantages=[1.0, 1.0, -2.0]
    )
    ratios = [math.exp(0.2), math.exp(-0.5)]
    wide = LossSettings(kind="gspo", clip_low=0.9, clip_high=9.0)
    loss, metrics = policy_loss(wide, batch)
    assert loss.item() == pytest.approx(-(ratios[0] * 1.0 + ratios[1] * -2.0) / 2)
    assert gradient(loss, batch).tolist() == pytest.approx([-ratios[0] / 4, -ratios[0] / 4, 2 * ratios[1] / 2])
    assert metrics.summary()["ratio_mean"] == pytest.approx((2 * ratios[0] + ratios[1]) / 3)
    # With the usual bounds both sequences are clipped, as a whole.
    loss, metrics = policy_loss(LossSettings(kind="gspo"), batch)
    assert loss.item() == pytest.approx(-(1.0004 - 2 * 0.9997) / 2)
    assert gradient(loss, batch).tolist() == [0.0, 0.0, 0.0]
    assert metrics.summary()["clipped_high"] == pytest.approx(2 / 3)
    assert metrics.summary()["clipped_low"] == pytest.approx(1 / 3)


def test_cispo_by_hand():
    batch = packed([2], logprobs=[math.log(9.0), -1.0], behaviour=[0.0, 0.0], proximal=None, advantages=[1.0, -2.0])
    loss, _ = policy_loss(LossSettings(kind="cispo", clip_high=1.0), batch)
    weights = [2.0, math.exp(-1.0)]
    assert loss.item() == pytest.approx(-(weights[0] * math.log(9.0) + weights[1] * -2.0 * -1.0) / 2)
    assert gradient(loss, batch).tolist() == pytest.approx([-weights[0] / 2, 2.0 * weights[1] / 2])


def test_aggregations_by_hand():
    batch = packed([1, 3])
    assert token_shares(Aggregation.TOKEN_MEAN, batch).tolist() == pytest.approx([1 / 4] * 4)
    assert token_shares(Aggregation.SEQUENCE_MEAN, batch).tolist() == pytest.approx([1 / 2] + [1 / 6] * 3)
    # Dr. GRPO: a constant, here two sequences of at most ten tokens.
    assert token_shares(Aggregation.TOKEN_MEAN, replace(batch, total_tokens=20)).tolist() == pytest.approx([1 / 20] * 4)


def test_kl_and_entropy_by_hand():
    batch = packed(
        [2],
        logprobs=[-1.0, -1.0],
        behaviour=[-1.0, -1.0],
        proximal=None,
        reference=[-1.0, -0.5],
        entropy=[0.3, 0.7],
        advantages=[0.0, 0.0],
    )
    loss, metrics = policy_loss(LossSettings(kl_weight=2.0, entropy_weight=0.1), batch)
    k3 = math.exp(0.5) - 1.0 - 0.5
    assert loss.item() == pytest.approx(2.0 * k3 / 2 - 0.1 * 0.5)
    summary = metrics.summary()
    assert summary["kl"] == pytest.approx(k3 / 2)
    assert summary["entropy"] == pytest.approx(0.5)
    assert summary["policy_loss"] == 0


def test_kl_estimators_by_hand():
    logprobs, reference = torch.tensor([-1.0]), torch.tensor([-1.5])
    estimates = {kind: kl_estimate(kind, logprobs, reference).item() for kind in KlEstimator}
    assert estimates[KlEstimator.K1] == pytest.approx(0.5)
    assert estimates[KlEstimator.K2] == pytest.approx(0.125)
    assert estimates[KlEstimator.K3] == pytest.approx(math.exp(-0.5) - 1 + 0.5)


def test_value_loss_by_hand():
    old, returns = torch.tensor([0.0, 0.0, 0.0]), torch.tensor([1.0, 1.0, -1.0])
    values = torch.tensor([0.1, 0.5, 0.5], requires_grad=True)
    loss, metrics = value_loss(values, returns, old, clip=0.2, total=3)
    # near; past the clip towards the return; past it away from the return
    assert loss.item() == pytest.approx((0.9**2 + 0.8**2 + 1.5**2) / 6)
    assert torch.autograd.grad(loss, values)[0].tolist() == pytest.approx([-0.9 / 3, 0.0, 1.5 / 3])
    assert metrics.summary()["value_clipped"] == pytest.approx(1 / 3)
    assert metrics.summary()["value_error"] == pytest.approx((0.9**2 + 0.5**2 + 1.5**2) / 3)
    plain, _ = value_loss(values, returns, old, clip=None, total=3)
    assert plain.item() == pytest.approx((0.9**2 + 0.5**2 + 1.5**2) / 6)


# --- gradients by finite differences


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("kind", ["ppo", "gspo"])
@pytest.mark.parametrize("seed", range(3))
def test_gradients_are_those_of_finite_differences(kind, aggregation, seed):
    batch = packed([1, 4, 2], seed=seed)
    loss = LossSettings(kind=kind, clip_low=0.1, clip_high=0.15, aggregation=aggregation, **FULL)

    def value(logprobs, entropy):
        return policy_loss(loss, replace(batch, logprobs=logprobs, entropy=entropy))[0]

    assert torch.autograd.gradcheck(value, (batch.logprobs, batch.entropy.requires_grad_()))


@pytest.mark.parametrize("seed", range(3))
def test_the_gradient_of_cispo_is_that_of_its_objective_with_the_weights_held(seed):
    """The stopped gradient cannot be differenced; with the weights as numbers, the objective can."""
    batch = packed([1, 4, 2], seed=seed)
    loss = LossSettings(kind="cispo", clip_low=0.1, clip_high=0.15)
    weights = (batch.logprobs - batch.proximal).exp().clamp(0.9, 1.15).detach()

    def held(logprobs):
        return -(weights * batch.advantages * logprobs).mean()

    assert torch.autograd.gradcheck(held, (batch.logprobs,))
    close(gradient(policy_loss(loss, batch)[0], batch), gradient(held(batch.logprobs), batch))


@pytest.mark.parametrize("estimator", KlEstimator)
def test_gradients_of_kl_estimators_are_those_of_finite_differences(estimator):
    batch = packed([5])
    assert torch.autograd.gradcheck(lambda x: kl_estimate(estimator, x, batch.reference), (batch.logprobs,))


@pytest.mark.parametrize("clip", [None, 0.2])
def test_the_gradient_of_the_value_loss_is_that_of_finite_differences(clip):
    returns, old, values = torch.randn(3, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda v: value_loss(v, returns, old, clip=clip, total=8)[0], (values.requires_grad_(),)
    )


# --- what the KL estimators estimate, exactly, over a whole distribution


def test_what_kl_estimators_estimate():
    logits = torch.tensor([0.3, -0.2, 1.0], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.tensor([0.0, 0.5, 0.2], dtype=torch.float64), 0)
    logprobs = torch.log_softmax(logits, 0)
    policy = logprobs.exp()
    reverse = (policy * (logprobs - reference)).sum()
    forward = (reference.exp() * (reference - logprobs)).sum()

    def expected(estimator):
        """The mean over tokens of the policy, and the mean gradient; the sampling distribution is constant."""
        mean = (policy.detach() * kl_estimate(estimator, logprobs, reference)).sum()
        return mean, torch.autograd.grad(mean, logits, retain_graph=True)[0]

    slope = {value: torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (reverse, forward)}
    for unbiased in (KlEstimator.K1, KlEstimator.K3):
        close(expected(unbiased)[0], reverse)
    close(expected(KlEstimator.K1)[1], torch.zeros_like(logits))
    close(expected(KlEstimator.K2)[1], slope[reverse])
    close(expected(KlEstimator.K3)[1], slope[forward])


@given(st.floats(-5, 5), st.floats(-5, 5))
def test_k2_and_k3_are_never_negative(left, right):
    pair = torch.tensor([left], dtype=torch.float64), torch.tensor([right], dtype=torch.float64)
    for estimator in (KlEstimator.K2, KlEstimator.K3):
        assert kl_estimate(estimator, *pair).item() >= 0
        assert kl_estimate(estimator, pair[0], pair[0]).item() == 0


# --- what holds for every batch


@settings(deadline=None, max_examples=40)
@given(LENGTHS, SEEDS, st.sampled_from(KINDS), st.sampled_from(Aggregation), st.data())
def test_micro_batches_add_up_to_the_batch(lengths, seed, kind, aggregation, data):
    batch = packed(lengths, seed=seed, per_token=True)
    loss = LossSettings(kind=kind, clip_low=0.1, clip_high=0.15, aggregation=aggregation, **FULL)
    where = data.draw(st.lists(st.integers(0, 2), min_size=len(lengths), max_size=len(lengths)))
    whole, metrics = policy_loss(loss, batch)
    parts, total = Metrics(), torch.zeros_like(whole)
    for number in sorted(set(where)):
        part, measured = policy_loss(loss, cut(batch, [i for i, place in enumerate(where) if place == number]))
        total, parts = total + part, parts + measured
    close(total, whole)
    close(gradient(total, batch), gradient(whole, batch))
    assert parts.summary() == pytest.approx(metrics.summary(), rel=1e-9, abs=1e-12)


@settings(deadline=None, max_examples=40)
@given(LENGTHS, SEEDS, st.sampled_from(KINDS))
def test_the_order_of_tokens_does_not_matter(lengths, seed, kind):
    batch = packed(lengths, seed=seed, per_token=True)
    order = torch.randperm(len(batch.sequence), generator=torch.Generator().manual_seed(seed))
    names = ("logprobs", "behaviour", "advantages", "proximal", "reference", "entropy", "sequence")
    shuffled = replace(batch, **{name: getattr(batch, name)[order] for name in names})
    loss = LossSettings(kind=kind, clip_low=0.1, clip_high=0.15, **FULL)
    left, right = policy_loss(loss, batch)[0], policy_loss(loss, shuffled)[0]
    close(left, right)
    close(gradient(left, batch), gradient(right, batch))


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 8), SEEDS)
def test_gspo_of_one_token_sequences_is_ppo(count, seed):
    batch = packed([1] * count, seed=seed)
    clip = {"clip_low": 0.1, "clip_high": 0.15}
    left, measured = policy_loss(LossSettings(kind="gspo", **clip), batch)
    right, expected = policy_loss(LossSettings(kind="ppo", aggregation="token_mean", **clip), batch)
    close(left, right)
    close(gradient(left, batch), gradient(right, batch))
    assert measured.summary() == pytest.approx(expected.summary())


@settings(deadline=None, max_examples=40)
@given(LENGTHS, SEEDS)
def test_gspo_is_the_clipped_surrogate_of_sequences(lengths, seed):
    """With one advantage per sequence: −mean over sequences of min(s A, clip(s) A), differentiated as it stands."""
    batch = packed(lengths, seed=seed)
    loss, _ = policy_loss(LossSettings(kind="gspo", clip_low=0.1, clip_high=0.15), batch)
    terms = []
    for i in range(len(lengths)):
        mine = batch.sequence == i
        ratio = (batch.logprobs[mine] - batch.proximal[mine]).mean().exp()
        advantage = batch.advantages[mine][0]
        terms.append(torch.minimum(ratio * advantage, ratio.clamp(0.9, 1.15) * advantage))
    expected = -torch.stack(terms).mean()
    close(loss, expected)
    close(gradient(loss, batch), gradient(expected, batch))


@settings(deadline=None, max_examples=40)
@given(LENGTHS, SEEDS)
def test_inside_the_bounds_cispo_and_ppo_have_the_gradient_of_weighted_reinforce(lengths, seed):
    batch = packed(lengths, seed=seed, per_token=True)
    wide = {"clip_low": 1.0, "clip_high": 1e9}
    ratio = (batch.logprobs - batch.proximal).exp().detach()
    reinforce = gradient(-(ratio * batch.advantages * batch.logprobs).mean(), batch)
    for kind in ("cispo", "ppo"):
        close(gradient(policy_loss(LossSettings(kind=kind, **wide), batch)[0], batch), reinforce)


@settings(deadline=None, max_examples=40)
@given(LENGTHS, SEEDS, st.sampled_from(KINDS))
def test_on_policy_every_loss_has_the_gradient_of_reinforce(lengths, seed, kind):
    batch = packed(lengths, seed=seed)
    batch = replace(batch, behaviour=batch.logprobs.detach(), proximal=None)
    loss, metrics = policy_loss(LossSettings(kind=kind, aggregation="token_mean"), batch)
    close(gradient(loss, batch), -batch.advantages / len(batch.sequence))
    summary = metrics.summary()
    assert (summary["mismatch"], summary["max_ratio"], summary["clipped_high"]) == (0, 1, 0)
    assert summary["effective_samples"] == pytest.approx(1.0)


@settings(deadline=None, max_examples=40)
@given(LENGTHS, SEEDS)
def test_cispo_gives_every_token_a_gradient(lengths, seed):
    batch = packed(lengths, seed=seed, spread=2.0, per_token=True)
    loss = LossSettings(kind="cispo", clip_low=0.2, clip_high=0.2)
    assert (gradient(policy_loss(loss, batch)[0], batch) != 0).all()


# --- what is refused


def test_what_a_loss_needs_is_asked_for():
    batch = packed([2], proximal=None, reference=None, entropy=None)
    with pytest.raises(ValueError, match="KL penalty needs the reference"):
        policy_loss(LossSettings(kl_weight=0.1), batch)
    with pytest.raises(ValueError, match="entropy bonus needs the entropy"):
        policy_loss(LossSettings(entropy_weight=0.1), batch)
    with pytest.raises(ValueError, match="`mask` needs proximal"):
        policy_loss(LossSettings(correction=CorrectionSettings(kind="mask")), batch)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"behaviour": torch.zeros(3)}, r"behaviour has shape \(3,\), not \(2,\)"),
        ({"logprobs": torch.zeros(1, 2)}, "logprobs must be 1-D"),
        ({"sequence": torch.zeros(2)}, "sequence must be int64"),
        ({"proximal": torch.zeros(2, requires_grad=True)}, "proximal is a constant of the loss"),
        ({"total_tokens": 0}, "totals must be positive"),
    ],
)
def test_a_batch_that_cannot_be_is_refused(change, reason):
    with pytest.raises(ValueError, match=reason):
        replace(packed([2]), **change)
