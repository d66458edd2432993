"""Off-policy corrections: weights for tokens sampled by a policy other than the one being trained.

A trajectory may span several versions, and the engine uses different kernels from the trainer. Three policies:

    π_b      behaviour: the version and engine that sampled the token; its log-probability came with the token
    π_prox   proximal: the trainer's weights before its first update on the batch
    π_θ      the weights being trained

A single ratio mixes two distances: PPO's clip, meant to keep π_θ near π_prox, is used up by the distance from π_b to
π_prox. Decoupled PPO (Hilton et al. 2021, arXiv:2110.00641; for language models AReaL, Fu et al. 2025,
arXiv:2505.24298) separates them: the clip sees π_θ / π_prox, and a constant weight w = π_prox / π_b corrects for the
sampling policy. An unbounded w has unbounded variance, so it is truncated or masked.

Ratios are per token and use each token's own log-probability, so a trajectory of several versions needs no special
case.
"""

import torch

from rollart.algo.metrics import Metrics
from rollart.algo.packed import sequence_lengths, sequence_sums
from rollart.config.algorithm import CorrectionKind, CorrectionLevel, CorrectionSettings

LARGEST_LOG_RATIO = 20.0
"""Clamp on log-ratios: e^20 ≈ 5e8 and its square are finite in float32, and far beyond any cap."""


def mismatch(trainer: torch.Tensor, behaviour: torch.Tensor) -> Metrics:
    """Distance of the trainer's log-probabilities from those the tokens were sampled with, Δ = log π − log π_b.

    - mismatch: mean |Δ|;
    - mismatch_kl: KL(π_b ‖ π), estimated as ρ − 1 − Δ with ρ = e^Δ: non-negative, and 0 only where they agree;
    - mismatch_ratio: mean ρ, which is 1 in expectation at any distance and so checks the log-probabilities themselves;
    - max_ratio: the largest of ρ and 1/ρ, the worst token in either direction;
    - effective_samples: see `Metrics.summary`.

    On fresh samples this is the numerical difference between engine and trainer; on stale ones it includes how far the
    policy has moved.
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
    """Per-token correction weights, detached, and metrics of how often the raw weights were out of bounds.

        w_t = ρ_t = π_prox / π_b of the token, or of its sequence: Π ρ_t, or (Π ρ_t)^(1/n)
        truncate:   min(w, cap)
        mask:       w if floor ≤ w ≤ cap else 0

    Truncated: TIS (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"), before
    that V-trace (Espeholt et al. 2018, arXiv:1802.01561). Masked: MIS (Liu et al. 2025, "When speed kills stability"),
    per sequence; IcePop (Ling Team 2025, arXiv:2510.18855), per token within [0.5, 5].

    Where π_prox = π_b, every kind gives weight 1. Truncation keeps every token and is biased towards π_b. Masked tokens
    contribute no gradient but still count in the means, so masking also makes the step smaller. Weights are never
    normalised to a mean of 1: the result would depend on how the batch is split.
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
