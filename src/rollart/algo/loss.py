"""Policy-gradient losses, as pure functions of log-probabilities.

    r_t  = exp(log π_θ(a_t) − log π_b(a_t))                                      the ratio, per token
    L    = −(1/T) Σ_t min(r_t A, clip(r_t, 1 − ε, 1 + ε) A)                      over all T action tokens of the batch

The clipped surrogate is PPO's (Schulman et al. 2017, arXiv:1707.06347, eq. 7). The advantage A is that of GRPO (Shao et
al. 2024, DeepSeekMath, arXiv:2402.03300): one number per trajectory, relative to its group. The mean is over tokens of
the whole batch instead of per trajectory (Yu et al. 2025, DAPO, arXiv:2503.14476, eq. 8), so that a token of a long
answer weighs as much as one of a short answer. There is no KL term. π_b is the policy that sampled: its log-probability
is the engine's, recorded token by token, also where a trajectory spans several versions.
"""

from typing import NamedTuple

import torch


class GrpoTerms(NamedTuple):
    """Sums over the action tokens of one sequence; a batch adds them up and divides by all its tokens."""

    loss: torch.Tensor
    """Carries the gradient."""
    ratio: torch.Tensor
    mismatch: torch.Tensor
    """Of |log π_θ − log π_b|."""
    tokens: int


def grpo_terms(
    logprobs: torch.Tensor, behaviour: torch.Tensor, mask: torch.Tensor, *, advantage: float, clip: float
) -> GrpoTerms:
    """The terms of one sequence. `logprobs`, `behaviour`, `mask`: (n,), the mask is true where the policy acted."""
    logprobs, behaviour = logprobs[mask], behaviour[mask]
    difference = logprobs - behaviour
    ratio = torch.exp(difference)
    surrogate = torch.minimum(ratio * advantage, torch.clamp(ratio, 1.0 - clip, 1.0 + clip) * advantage)
    return GrpoTerms(
        loss=-surrogate.sum(),
        ratio=ratio.detach().sum(),
        mismatch=difference.detach().abs().sum(),
        tokens=int(logprobs.numel()),
    )
