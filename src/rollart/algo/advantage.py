"""Advantages: how much better a trajectory, a turn or a token did than its baseline.

The baseline is the rest of the group (GRPO, Dr. GRPO, RLOO, GiGPO), the rest of the batch (REINFORCE++) or a learned
value (GAE). None of them needs tokens or torch, so the controller computes them in float64. All are
permutation-equivariant: reordering the trajectories reorders the advantages and changes nothing else.
"""

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

EPSILON = 1e-6
"""Added to a standard deviation before dividing by it, so that near-equal rewards give near-zero advantages."""


def grpo(rewards: Sequence[float]) -> list[float]:
    """Group-relative advantages, A_i = (r_i − mean r) / (std r + 1e-6) (GRPO, Shao et al. 2024, arXiv:2402.03300).

    The mean is the baseline, so the advantages of a group sum to 0; if all rewards are equal, all advantages are 0. The
    standard deviation is the sample one (n − 1), as in the common implementations.

        >>> [round(a, 3) for a in grpo([1.0, 0.0, 0.0, 1.0])]
        [0.866, -0.866, -0.866, 0.866]
        >>> grpo([1.0, 1.0])
        [0.0, 0.0]
    """
    return _plain(_standardised(_array(rewards)))


def dr_grpo(rewards: Sequence[float]) -> list[float]:
    """A_i = r_i − mean r (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783).

    GRPO without the standard deviation, which over-weights prompts that are nearly always or nearly never solved.
    Advantages sum to 0. The paper's other change, dividing the loss by a constant rather than by a length, is
    `total_tokens` of a packed batch.

        >>> dr_grpo([1.0, 0.0, 0.0, 1.0])
        [0.5, -0.5, -0.5, 0.5]
    """
    return _plain(_centred(_array(rewards)))


def rloo(rewards: Sequence[float]) -> list[float]:
    """A_i = r_i − mean of the others' r (RLOO, Ahmadian et al. 2024, arXiv:2402.14740; Kool et al. 2019).

    The baseline is independent of the trajectory itself, so the gradient is unbiased. Computed as n / (n − 1) times the
    advantage of `dr_grpo`. A group of one has nothing to compare with and an advantage of 0.

        >>> rloo([1.0, 0.0, 0.0])
        [1.0, -0.5, -0.5]
    """
    values = _array(rewards)
    if values.size < 2:
        return [0.0] * values.size
    return _plain(_centred(values) * (values.size / (values.size - 1)))


def reinforce_plus_plus(groups: Sequence[Sequence[float]], *, group_baseline: bool = False) -> list[list[float]]:
    """A_i = (b_i − mean b) / (std b + 1e-6) over the whole batch (REINFORCE++, Hu et al. 2025, arXiv:2501.03262).

    b_i is the reward, or, with `group_baseline`, the reward minus the mean of its group (the paper's variant for
    several samples per prompt). With a single standard deviation for the batch, a group of near-equal rewards is not
    amplified and an easy prompt weighs no more than a hard one. Advantages sum to 0 over the batch, and with
    `group_baseline` within every group too.

        >>> [[round(a, 3) for a in group] for group in reinforce_plus_plus([[1.0, 0.0], [0.0, 0.0]])]
        [[1.5, -0.5], [-0.5, -0.5]]
    """
    parts = [_centred(_array(group)) if group_baseline else _array(group) for group in groups]
    if not parts:
        return []
    batch = _standardised(np.concatenate(parts))
    ends = np.cumsum([part.size for part in parts])
    return [_plain(batch[end - part.size : end]) for part, end in zip(parts, ends, strict=True)]


def gigpo(
    states: Sequence[Sequence[Hashable]],
    rewards: Sequence[Sequence[float]],
    *,
    step_weight: float = 1.0,
    discount: float = 0.95,
    normalise: bool = True,
) -> list[list[float]]:
    """One advantage per turn: A_it = A^E_i + ω A^S_it (GiGPO, Feng et al. 2025, arXiv:2505.10978).

        A^E_i  = (R_i − mean R) / F                    episodes of the group, R_i = Σ_t r_it
        A^S_it = (G_it − mean G) / F                   turns of the group that start in the same state
        G_it   = Σ_{k ≥ t} γ^(k − t) r_ik

    `states[i][t]` is the key of the state that turn t of trajectory i starts in; `rewards[i][t]` is the reward of that
    turn, with any reward for the whole episode included in the last one. F is the standard deviation + 1e-6, or 1
    without `normalise`. A turn whose state no other turn of the group starts in has A^S = 0. A^S sums to 0 over the
    turns of a state, A^E over the trajectories of the group.

        >>> gigpo([["s", "a"], ["s"]], [[0.0, 1.0], [0.0]], discount=1.0, normalise=False)
        [[1.0, 0.5], [-1.0]]
    """
    scaled = _standardised if normalise else _centred
    episodes = scaled(_array([float(np.sum(turns)) for turns in rewards]))
    meetings: dict[Hashable, list[tuple[int, int]]] = {}
    for i, keys in enumerate(states):
        if len(keys) != len(rewards[i]):
            raise ValueError(
                f"trajectory {i} has {len(keys)} states and {len(rewards[i])} rewards: one of each per turn"
            )
        for t, key in enumerate(keys):
            meetings.setdefault(key, []).append((i, t))
    returns = [discounted(turns, discount) for turns in rewards]
    advantages = [[float(episode)] * len(keys) for episode, keys in zip(episodes, states, strict=True)]
    for turns in meetings.values():
        for (i, t), advantage in zip(turns, scaled(_array([returns[i][t] for i, t in turns])), strict=True):
            advantages[i][t] += step_weight * float(advantage)
    return advantages


class Gae(NamedTuple):
    """Advantages, and the returns that the value head is trained on."""

    advantages: NDArray[np.float64]
    returns: NDArray[np.float64]


def gae(
    rewards: "Sequence[float] | NDArray[np.float64]",
    values: "Sequence[float] | NDArray[np.float64]",
    *,
    discount: float = 1.0,
    trace: float = 0.95,
    bootstrap: float = 0.0,
) -> Gae:
    """Generalised advantage estimation over one trajectory (Schulman et al. 2015, arXiv:1506.02438).

        δ_t = r_t + γ V_{t+1} − V_t,    A_t = Σ_{k ≥ t} (γλ)^(k − t) δ_k,    return_t = A_t + V_t

    A step is anything with a reward and a value: a token or a turn. `values[t]` is the value before step t; `bootstrap`
    is the value of the state in which a trajectory was truncated, 0 where the episode ended. `trace` is λ: with 1 the
    returns are the discounted rewards, whatever the values; with 0 they are the one-step targets.

        >>> gae([0.0, 1.0], [0.5, 0.5], trace=1.0).advantages.tolist()
        [0.5, 0.5]
    """
    reward, value = _array(rewards), _array(values)
    if reward.shape != value.shape:
        raise ValueError(f"{reward.size} rewards and {value.size} values: one of each per step")
    surprise = reward + discount * np.append(value, bootstrap)[1:] - value
    advantages = discounted(surprise, discount * trace)
    return Gae(advantages, advantages + value)


def at_last_tokens(rewards: Sequence[float], turns: NDArray[np.int64]) -> NDArray[np.float64]:
    """Turn rewards as token rewards: each is placed on the last token of its turn. `turns` must be non-decreasing.

    The reward of a turn without tokens goes to the last token before it, which led there. A reward before the first
    token is dropped: no token could have earned it.

        >>> at_last_tokens([1.0, 2.0, 4.0], np.array([0, 0, 2])).tolist()
        [0.0, 3.0, 4.0]
    """
    out = np.zeros(turns.size)
    for place, reward in zip(np.searchsorted(turns, np.arange(len(rewards)), side="right") - 1, rewards, strict=True):
        if place >= 0:
            out[place] += reward
    return out


class Spread(NamedTuple):
    """Number, mean and sum of squared deviations of values that may be in several parts.

    >>> whole = Spread.of_parts([Spread.of(np.array([3.0])), Spread.of(np.array([1.0, 2.0])), Spread.of(np.zeros(0))])
    >>> whole.variance.__round__(3), whole.standardised(np.array([3.0, 1.0, 2.0])).round(3).tolist()
    (0.667, [1.0, -1.0, 0.0])
    """

    number: int
    mean: float
    squares: float

    @staticmethod
    def of(values: NDArray[np.float64]) -> "Spread":
        mean = float(values.mean()) if values.size else 0.0
        return Spread(values.size, mean, float(np.square(values - mean).sum()))

    @staticmethod
    def of_parts(parts: "Sequence[Spread]") -> "Spread":
        number = sum(part.number for part in parts)
        if not number:
            return Spread(0, 0.0, 0.0)
        mean = sum(part.number * part.mean for part in parts) / number
        return Spread(number, mean, sum(part.squares + part.number * (part.mean - mean) ** 2 for part in parts))

    @property
    def variance(self) -> float:
        return self.squares / self.number if self.number else 0.0

    def standardised(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Normalise to mean 0 and standard deviation 1; constant values become 0."""
        deviation = math.sqrt(self.squares / (self.number - 1)) if self.number > 1 else 0.0
        standardised: NDArray[np.float64] = (values - self.mean) / (deviation + EPSILON)
        return standardised


def discounted(rewards: "Sequence[float] | NDArray[np.float64]", discount: float) -> NDArray[np.float64]:
    """Discounted returns, G_t = Σ_{k ≥ t} γ^(k − t) r_k.

    >>> discounted([1.0, 0.0, 4.0], 0.5).tolist()
    [2.0, 2.0, 4.0]
    """
    out = _array(rewards).copy()
    for t in range(out.size - 2, -1, -1):
        out[t] += discount * out[t + 1]
    return out


def zero_variance(rewards: Sequence[float]) -> bool:
    """Whether a group carries no signal: all rewards are equal, so every group-relative advantage is 0.

    Dynamic sampling (DAPO, Yu et al. 2025, arXiv:2503.14476) drops such groups and samples others instead. The
    comparison is exact because it is between rewards as environments returned them, not values computed from them.

        >>> zero_variance([1.0, 1.0]), zero_variance([1.0, 0.0])
        (True, False)
    """
    values = _array(rewards)
    return not values.size or bool(values.min() == values.max())


def _centred(values: NDArray[np.float64]) -> NDArray[np.float64]:
    # Compare instead of subtracting: the mean of equal numbers may differ from them in the last bit.
    if not values.size or values.min() == values.max():
        return np.zeros_like(values)
    centred: NDArray[np.float64] = values - values.mean()
    return centred


def _standardised(values: NDArray[np.float64]) -> NDArray[np.float64]:
    centred = _centred(values)
    if not centred.any():
        return centred
    standardised: NDArray[np.float64] = centred / (values.std(ddof=1) + EPSILON)
    return standardised


def _array(values: "Sequence[float] | NDArray[np.float64]") -> NDArray[np.float64]:
    return np.asarray(values, dtype=np.float64)


def _plain(values: NDArray[np.float64]) -> list[float]:
    return [float(value) for value in values]
