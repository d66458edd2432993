"""pass@k, against counting all draws."""

from itertools import combinations

import pytest

from rollart.policy.passes import pass_at_k, passes, sizes
from rollart.types.ids import PromptId


@pytest.mark.parametrize("attempts", range(1, 7))
def test_the_estimate_is_the_share_of_draws_with_a_pass(attempts: int) -> None:
    for passed in range(attempts + 1):
        outcomes = [True] * passed + [False] * (attempts - passed)
        for k in range(1, attempts + 1):
            draws = list(combinations(outcomes, k))
            assert pass_at_k(attempts, passed, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_what_is_shown() -> None:
    assert [sizes(samples) for samples in (1, 2, 3, 4, 8)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4], [1, 2, 4, 8]]


def test_attempts_without_a_reward_are_left_out() -> None:
    whole, half = PromptId("whole"), PromptId("half")
    assert passes({whole: [1.0, 0.0], half: [0.9]}, 2, 1.0) == {"1": 0.25, "2": 1.0}
    assert passes({half: [0.9]}, 2, 0.9) == {"1": 1.0}
    assert passes({}, 2, 1.0) == {}
