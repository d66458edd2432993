"""Every runtime keeps the promises of its port."""

from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from harnesses.runtimes import RUNTIMES

from rollart.conformance.case import Case, NotApplicable
from rollart.conformance.runtime import CASES, RuntimeHarness


@pytest.mark.parametrize("implementation", RUNTIMES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_conforms(
    case: Case[RuntimeHarness, Coroutine[Any, Any, None]],
    implementation: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    if implementation == "ray":
        request.getfixturevalue("local_ray")
    harness = RUNTIMES[implementation](tmp_path)
    try:
        harness.run(case.run(harness))
    except NotApplicable as reason:
        pytest.skip(str(reason))
