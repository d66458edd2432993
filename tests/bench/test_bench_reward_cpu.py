"""What a reward call costs the controller."""

import pytest

from rollart.bench.reward_cpu import controller_us_per_call


@pytest.mark.long
def test_a_reward_call_costs_the_controller_little() -> None:
    """CPU time, so that others on the machine hardly count; the least of three."""
    assert min(controller_us_per_call(2000) for _ in range(3)) <= 300.0
