"""Every place for the folders of a run keeps the promises of its port."""

from pathlib import Path

import pytest
from harnesses.common import run
from harnesses.files import PLACES

from rollart.conformance.case import Case
from rollart.conformance.files import CASES, FilesHarness


@pytest.mark.parametrize("implementation", PLACES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_conforms(
    case: Case[FilesHarness, None], implementation: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if implementation == "ray":
        request.getfixturevalue("local_ray")
    run(case, PLACES[implementation](tmp_path))
