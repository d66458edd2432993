"""Off-policy corrections: what to do about tokens that were sampled by another policy than the one that is trained.

A trajectory may span several versions, and the engine computes with other kernels than the trainer. Three policies:

    π_b      behaviour: what sampled the token, version and engine included; its log-probability came with the token
    π_prox   proximal: the trainer's weights before its first update on the batch
    π_θ      what is being trained

One ratio for both distances mixes them up: the clip of PPO, meant to keep π_θ near π_prox, is then used up by the
distance π_prox has from π_b. Decoupled PPO (Hilton et al. 2021, arXiv:2110.00641; for language models AReaL, Fu et al.
2025, arXiv:2505.24298) keeps them apart: the clip sees π_θ / π_prox, and the weight w = π_prox / π_b, a constant,
corrects for who sampled. As an unbounded w has an unbounded variance, it is truncated or masked.

Per token, the version a token was sampled with needs no special case: its own log-probability is in its own ratio.
"""

import torch

from rollart.algo.metrics import Metrics
from rollart.algo.packed import sequence_lengths, sequence_sums
from rollart.config.algorithm import CorrectionKind, CorrectionLevel, CorrectionSettings

LARGEST_LOG_RATIO = 20.0
"""e^20 ≈ 5e8 and its square are still numbers in float32; no cap is near."""


def mismatch(trainer: torch.Tensor, behaviour: torch.Tensor) -> Metrics:
    """How far the trainer's log-probabilities are from those the tokens were sampled with, Δ = log π − log π_b.

    - mismatch: mean |Δ|;
    - mismatch_kl: KL(π_b ‖ π), estimated by ρ − 1 − Δ with ρ = e^Δ: never negative, and 0 only where they agree;
    - mismatch_ratio: mean ρ, 1 in expectation whatever the distance, so a check of the log-probabilities themselves;
    - max_ratio: the largest of ρ and 1/ρ, the worst token in either direction;
    - effective_samples: see `Metrics.summary`.

    On fresh samples it is the numerical difference of engine and trainer; on stale ones what the policy moved is in it.
    """
    difference = (trainer - behaviour).detach()
    bounded = difference.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    ratio = bounded.exp()
    worst = {"max_ratio": bounded.abs().max().exp()} if difference.numel() else {}
    return Metrics(
        {
            "mismatch": difference.abs().sum(),
            "mismatch_kl": (ratio - 1.0 - bounded).sum(),
            "mismatch_ratio": ratio.sum(),
            "mismatch_ratio_squared": ratio.square().sum(),
        },
        worst,
    )


def correction_weights(
    settings: CorrectionSettings,
    proximal: torch.Tensor,
    behaviour: torch.Tensor,
    sequence: torch.Tensor,
    sequences: int,
) -> tuple[torch.Tensor, Metrics]:
    """One weight per token, a constant, and how often the raw ones were out of bounds.

        w_t = ρ_t = π_prox / π_b of the token, or of its sequence: Π ρ_t, or (Π ρ_t)^(1/n)
        truncate:   min(w, cap)
        mask:       w if floor ≤ w ≤ cap else 0

    Truncated: TIS (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"), before
    that V-trace (Espeholt et al. 2018, arXiv:1802.01561). Masked: MIS (Liu et al. 2025, "When speed kills stability"),
    per sequence; IcePop (Ling Team 2025, arXiv:2510.18855), per token within [0.5, 5].

    Where π_prox = π_b every weight is 1, of every kind. Truncation keeps every token and is biased towards π_b; a mask
    says nothing about the tokens that it drops, which still count in the means, so it also makes the step smaller.
    Weights are never scaled to a mean of 1: that would depend on how the batch is cut.
    """
    if settings.kind is CorrectionKind.NONE:
        return torch.ones_like(behaviour), Metrics()
    log_ratio = (proximal - behaviour).detach()
    if settings.level is not CorrectionLevel.TOKEN:
        sums = sequence_sums(log_ratio, sequence, sequences)
        if settings.level is CorrectionLevel.GEOMETRIC:
            sums = sums / sequence_lengths(log_ratio, sequence, sequences)
        log_ratio = sums[sequence]
    raw = log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
    high, low = raw > settings.cap, raw < settings.floor
    if settings.kind is CorrectionKind.TRUNCATE:
        weights = raw.clamp(max=settings.cap)
    else:
        weights = raw.masked_fill(high | low, 0.0)
    return weights, Metrics(
        {
            "correction_weight": weights.sum(),
            "correction_high": high.sum().to(raw.dtype),
            "correction_low": low.sum().to(raw.dtype),
        }
    )
