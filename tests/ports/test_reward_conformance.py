"""Every reward worker keeps the promises of its port."""

import pytest
from harnesses.common import run
from harnesses.rewards import REWARDS

from rollart.conformance.case import Case
from rollart.conformance.reward import CASES, RewardHarness


@pytest.mark.parametrize("implementation", REWARDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_conforms(case: Case[RewardHarness, None], implementation: str) -> None:
    run(case, REWARDS[implementation]())
