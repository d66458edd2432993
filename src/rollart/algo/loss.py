"""Policy and value losses, as pure functions of log-probabilities.

    r_t  = π_θ(a_t) / π_prox(a_t)                       the ratio; π_prox is π_b where no proximal policy is given
    w_t                                                 the off-policy correction, a constant (`correction`)
    L    = Σ_t m_t [ w_t · ℓ_t(r_t, A_t) + β KL_t − η H_t ]
    m_t  = 1 / tokens, or 1 / (sequences · tokens of its sequence)

PPO, GSPO and CISPO differ in ℓ. The divisors are totals of the whole batch, passed in, so the gradients of
micro-batches sum exactly to that of the batch. Masked tokens still count in the means. With a stop-gradient, as in
CISPO, the value of the loss is no measure of progress; only its gradient matters.
"""

import math
from typing import assert_never

import torch

from rollart.algo.correction import correction_weights, mismatch
from rollart.algo.metrics import Metrics
from rollart.algo.packed import PackedBatch, sequence_lengths, sequence_sums
from rollart.algo.surrogate import Surrogate, SurrogateFunction, checked, proximal, zero_without_advantage
from rollart.config.algorithm import Aggregation, CorrectionKind, KlEstimator, LossSettings, PolicyLoss, RatioBounds


def policy_loss(
    settings: LossSettings, batch: PackedBatch, function: SurrogateFunction | None = None
) -> tuple[torch.Tensor, Metrics]:
    """The scalar to back-propagate, and metrics that sum over micro-batches; see the module docstring.

    `function` is that of the settings, loaded by the caller; built-in ones need not be.
    """
    bounds = settings.ratio_bounds()
    if function is None:
        function = SURROGATES[PolicyLoss(settings.kind)]
    surrogate = checked(settings.factory(), function(batch, bounds, **settings.settings), batch)
    weights, corrected = _weights(settings, batch)
    shares = token_shares(settings.aggregated_by(), batch)
    policy = (shares * weights * surrogate.loss).sum()
    penalty, penalised = _penalty(settings, batch, shares)
    loss = policy + penalty
    measured = Metrics(
        {
            "loss": loss.detach(),
            "policy_loss": policy.detach(),
            "tokens": shares.new_tensor(float(shares.numel())),
            "sequences": shares.new_tensor(float(batch.sequences)),
            "ratio_mean": surrogate.ratio.sum(),
            # low and high count tokens clipped on the side the advantage pushes towards, dual those far out on the
            # other side.
            "clipped_low": ((surrogate.ratio < bounds.low) & (batch.advantages < 0)).sum().to(shares.dtype),
            "clipped_high": ((surrogate.ratio > bounds.high) & (batch.advantages > 0)).sum().to(shares.dtype),
            "clipped_dual": ((surrogate.ratio > bounds.dual) & (batch.advantages < 0)).sum().to(shares.dtype),
        }
    )
    trainer = batch.logprobs if batch.proximal is None else batch.proximal
    return loss, measured + penalised + mismatch(trainer, batch.behaviour) + corrected


@zero_without_advantage
def ppo(batch: PackedBatch, bounds: RatioBounds) -> Surrogate:
    """ℓ_t = −min(r_t A_t, clip(r_t, low, high) A_t) (PPO, Schulman et al. 2017, arXiv:1707.06347, eq. 7).

    high − 1 > 1 − low is DAPO's clip-higher (Yu et al. 2025, arXiv:2503.14476): an unlikely token can grow by more than
    a likely one may shrink, which preserves exploration. A token past the bound on the side its advantage pushes
    towards has no gradient. On the other side it keeps its gradient, so that mistakes can be undone, but only up to
    `dual`: beyond that the weight r_t would be excessive, and a negative advantage has no gradient either (dual clip,
    Ye et al. 2020, arXiv:1912.09729).
    """
    ratio = torch.exp(batch.logprobs - proximal(batch))
    clipped = ratio.clamp(bounds.low, bounds.high)
    gain = torch.minimum(ratio * batch.advantages, clipped * batch.advantages)
    if math.isfinite(bounds.dual):  # ∞ · 0 is NaN
        gain = torch.where(batch.advantages < 0, torch.maximum(gain, bounds.dual * batch.advantages), gain)
    return Surrogate(-gain, ratio.detach())


@zero_without_advantage
def gspo(batch: PackedBatch, bounds: RatioBounds) -> Surrogate:
    """PPO's ℓ with the ratio of the sequence, s = (Π r_t)^(1/n) (GSPO, Zheng et al. 2025, arXiv:2507.18071).

    Rewards belong to sequences, so sequences are clipped; since s is a geometric mean, its usual bounds are a thousand
    times narrower. This is the paper's form for per-token advantages, GSPO-token: with the ratio sg[s] · π_θ(a_t) /
    sg[π_θ(a_t)] every token has the value s and its own gradient. If all tokens of a sequence share one advantage,
    value and gradient equal those of plain GSPO; with one token per sequence it is `ppo`.
    """
    log_ratio = batch.logprobs.detach() - proximal(batch)
    means = sequence_sums(log_ratio, batch.sequence, batch.sequences) / sequence_lengths(
        log_ratio, batch.sequence, batch.sequences
    )
    ratio = torch.exp(means[batch.sequence] + (batch.logprobs - batch.logprobs.detach()))
    clipped = ratio.clamp(bounds.low, bounds.high)
    return Surrogate(-torch.minimum(ratio * batch.advantages, clipped * batch.advantages), ratio.detach())


@zero_without_advantage
def cispo(batch: PackedBatch, bounds: RatioBounds) -> Surrogate:
    """ℓ_t = −sg[clip(r_t, low, high)] A_t log π_θ(a_t) (CISPO, MiniMax 2025, arXiv:2506.13585).

    REINFORCE with a bounded importance weight: the clip applies to the weight, never to the gradient, so rare tokens
    that moved far (a "wait", a change of mind) still contribute. Inside the bounds the gradient is that of unclipped
    PPO.
    """
    ratio = torch.exp(batch.logprobs.detach() - proximal(batch))
    return Surrogate(-ratio.clamp(bounds.low, bounds.high) * batch.advantages * batch.logprobs, ratio)


SURROGATES = {PolicyLoss.PPO: ppo, PolicyLoss.GSPO: gspo, PolicyLoss.CISPO: cispo}


def kl_estimate(estimator: KlEstimator, logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Estimate of KL(π_θ ‖ π_ref) per token of π_θ (Schulman 2020, "Approximating KL divergence"); δ = log π_ref/π_θ.

        k1 = −δ              unbiased; often negative, large variance. Its gradient, ∇log π_θ, is 0 in expectation
        k2 = δ² / 2          biased, small variance. Its gradient is in expectation exactly ∇KL(π_θ ‖ π_ref)
        k3 = e^δ − 1 − δ     unbiased, never negative, small variance. Its gradient is in expectation ∇KL(π_ref ‖ π_θ)

    k3 is the default: GRPO uses it; the reported number is an unbiased estimate of the divergence; every token's
    penalty is ≥ 0, and 0 only at the reference; and near the reference, where a penalty is meant to keep the policy,
    its gradient agrees with k2's to first order. Far below the reference (δ ≫ 0) e^δ is steep and k2 is gentler.
    """
    delta = reference - logprobs
    match estimator:
        case KlEstimator.K1:
            return -delta
        case KlEstimator.K2:
            return delta.square() / 2
        case KlEstimator.K3:
            return torch.expm1(delta) - delta
        case other:
            assert_never(other)


def token_shares(aggregation: Aggregation, batch: PackedBatch) -> torch.Tensor:
    """Weight of each token in the loss. Sums to 1 over the batch if the totals are its tokens and sequences."""
    match aggregation:
        case Aggregation.TOKEN_MEAN:
            return torch.full_like(batch.behaviour, 1.0 / batch.total_tokens)
        case Aggregation.SEQUENCE_MEAN:
            lengths = sequence_lengths(batch.behaviour, batch.sequence, batch.sequences)
            return 1.0 / (batch.total_sequences * lengths[batch.sequence])
        case other:
            assert_never(other)


def value_loss(
    values: torch.Tensor, returns: torch.Tensor, old_values: torch.Tensor, *, clip: float | None, total: float
) -> tuple[torch.Tensor, Metrics]:
    """L = (1/total) Σ_t ½ max((V_t − R_t)², (clip(V_t, V°_t − ε, V°_t + ε) − R_t)²), over tokens with a value.

    V° is the value before the update and R the return of `advantage.gae`. The larger error counts, so a value that
    moved further than ε towards its return has no gradient, and one that moved away always has (the value clipping of
    PPO's first implementation, described in Engstrom et al. 2020, arXiv:2005.12729). `clip` = None is the plain squared
    error.
    """
    error = (values - returns).square()
    sums = {"value_error": error.detach().sum() / total}
    if clip is not None:
        clipped = (old_values + (values - old_values).clamp(-clip, clip) - returns).square()
        sums["value_clipped"] = (clipped > error).sum().to(values.dtype) / total
        error = torch.maximum(error, clipped)
    loss = 0.5 * error.sum() / total
    sums["value_loss"] = loss.detach()
    return loss, Metrics(sums)


def _penalty(settings: LossSettings, batch: PackedBatch, shares: torch.Tensor) -> tuple[torch.Tensor, Metrics]:
    """β KL − η H. Each term is also measured without a weight, if the batch has its inputs."""
    total = shares.new_zeros(())
    sums: dict[str, torch.Tensor] = {}
    if batch.reference is not None:
        kl = kl_estimate(settings.kl_estimator, batch.logprobs, batch.reference)
        sums["kl"] = kl.detach().sum()
        if settings.kl_weight:
            total = total + settings.kl_weight * (shares * kl).sum()
    elif settings.kl_weight:
        raise ValueError("a KL penalty needs the reference's log-probabilities of the batch")
    if batch.entropy is not None:
        sums["entropy"] = batch.entropy.detach().sum()
        if settings.entropy_weight:
            total = total - settings.entropy_weight * (shares * batch.entropy).sum()
    elif settings.entropy_weight:
        raise ValueError("an entropy bonus needs the entropy of every token of the batch, with its gradient")
    return total, Metrics(sums)


def _weights(settings: LossSettings, batch: PackedBatch) -> tuple[torch.Tensor, Metrics]:
    if settings.correction.kind is not CorrectionKind.NONE and batch.proximal is None:
        raise ValueError(
            f"the correction `{settings.correction.kind.value}` needs proximal log-probabilities: recompute those of "
            "the batch before the first update on it"
        )
    return correction_weights(settings.correction, proximal(batch), batch.behaviour, batch.sequence, batch.sequences)
