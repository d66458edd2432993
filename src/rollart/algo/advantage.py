"""Advantages from the rewards of a group."""

from collections.abc import Sequence

import numpy as np


def grpo(rewards: Sequence[float]) -> list[float]:
    """Group-relative advantages, A_i = (r_i - mean r) / (std r + 1e-6) (GRPO, Shao et al. 2024, arXiv 2402.03300).

    The mean is the baseline, so advantages of a group add up to 0; a group in which all rewards are equal has none.
    The deviation is that of the sample (n - 1), which is what the common implementations use.

        >>> [round(a, 3) for a in grpo([1.0, 0.0, 0.0, 1.0])]
        [0.866, -0.866, -0.866, 0.866]
        >>> grpo([1.0, 1.0])
        [0.0, 0.0]
    """
    values = np.asarray(rewards, dtype=np.float64)
    # Compared, not computed: the mean of equal numbers may differ from them in the last bit.
    if not values.size or values.min() == values.max():
        return [0.0] * values.size
    return [float(a) for a in (values - values.mean()) / (values.std(ddof=1) + 1e-6)]
