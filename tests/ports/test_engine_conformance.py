"""Every engine keeps the promises of its port."""

import pytest
from harnesses.common import run
from harnesses.engines import ENGINES

from rollart.conformance.case import Case
from rollart.conformance.engine import CASES, EngineHarness


@pytest.mark.parametrize("implementation", ENGINES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_conforms(case: Case[EngineHarness, None], implementation: str) -> None:
    run(case, ENGINES[implementation]())
