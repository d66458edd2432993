"""Every weight store keeps the promises of its port."""

import pytest
from harnesses import STORES, run

from rollart.ports.conformance.case import Case
from rollart.ports.conformance.weights import CASES, WeightStoreHarness


@pytest.mark.parametrize("implementation", STORES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_conforms(case: Case[WeightStoreHarness, None], implementation: str) -> None:
    run(case, STORES[implementation]())
