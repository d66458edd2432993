"""Every environment worker keeps the promises of its port."""

import pytest
from harnesses.common import run
from harnesses.environments import ENVIRONMENTS

from rollart.conformance.case import Case
from rollart.conformance.environment import CASES, EnvironmentHarness


@pytest.mark.parametrize("implementation", ENVIRONMENTS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_conforms(case: Case[EnvironmentHarness, None], implementation: str) -> None:
    run(case, ENVIRONMENTS[implementation]())
