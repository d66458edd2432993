"""Every weight store keeps the promises of its port."""

from pathlib import Path

import pytest
from harnesses.common import run
from harnesses.stores import STORES

from rollart.conformance.case import Case
from rollart.conformance.weights import CASES, WeightStoreHarness


@pytest.mark.parametrize("implementation", STORES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_conforms(case: Case[WeightStoreHarness, None], implementation: str, tmp_path: Path) -> None:
    run(case, STORES[implementation](tmp_path))
