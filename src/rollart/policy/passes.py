"""pass@k and mean@k of an evaluation with several attempts at each prompt.

Of `n` attempts of which `c` passed, `k` drawn without replacement contain a passed one with probability
1 - C(n - c, k) / C(n, k): the unbiased estimate of pass@k (Chen et al., 2021, arXiv:2107.03374).
"""

import math
from collections.abc import Iterable, Mapping, Sequence

from rollart.types.ids import PromptId


def pass_at_k(attempts: int, passed: int, k: int) -> float:
    """Estimate of one prompt; `k` is at most `attempts`.

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 4), pass_at_k(4, 0, 2)
    (0.25, 1.0, 0.0)
    """
    return 1.0 - math.comb(attempts - passed, k) / math.comb(attempts, k)


def sizes(samples: int) -> list[int]:
    """The k that are shown: powers of two, and all attempts.

    >>> sizes(6), sizes(1)
    ([1, 2, 4, 6], [1])
    """
    powers = [2**power for power in range(samples.bit_length()) if 2**power < samples]
    return [*powers, samples]


def passes(rewards: Mapping[PromptId, Sequence[float]], samples: int, threshold: float) -> dict[str, float]:
    """pass@k by k, as means over the prompts that have at least k attempts with a reward; k without any is left out.

    >>> passes({PromptId("a"): [1.0, 0.0], PromptId("b"): [0.0, 0.0]}, 2, 1.0)
    {'1': 0.25, '2': 0.5}
    """
    found = {}
    for k in sizes(samples):
        estimates = [
            pass_at_k(len(values), _passed(values, threshold), k) for values in rewards.values() if len(values) >= k
        ]
        if estimates:
            found[str(k)] = math.fsum(estimates) / len(estimates)
    return found


def _passed(values: Iterable[float], threshold: float) -> int:
    return sum(value >= threshold for value in values)
