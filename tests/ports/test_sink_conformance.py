"""Every event sink keeps the promises of its port."""

from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from harnesses.sinks import SINKS

from rollart.conformance.case import Case, NotApplicable
from rollart.conformance.sink import CASES, EventSinkHarness


@pytest.mark.parametrize("implementation", SINKS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_conforms(case: Case[EventSinkHarness, Coroutine[Any, Any, None]], implementation: str, tmp_path: Path) -> None:
    harness = SINKS[implementation](tmp_path)
    try:
        harness.run(case.run(harness))
    except NotApplicable as reason:
        pytest.skip(str(reason))
