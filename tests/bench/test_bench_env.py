"""`rollart bench env` measures what hosting an environment costs."""

import pytest

from rollart.bench.env_run import measure


def test_it_measures_workers_with_and_without_an_interpreter_of_their_own() -> None:
    figures = measure(environments=70, turns=3)
    assert set(figures) == {"own_us", "worker_us", "hosting_us", "interpreter_us", "interpreter_adds_us"}
    assert figures["worker_us"] > figures["own_us"] > 0


@pytest.mark.long
def test_a_step_of_1000_environments_costs_little() -> None:
    """CPU time, which a busy machine hardly changes."""
    figures = measure(environments=1000, turns=40)
    assert figures["hosting_us"] <= 200
    assert figures["interpreter_adds_us"] <= 300
