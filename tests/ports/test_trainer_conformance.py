"""Every trainer keeps the promises of its port."""

from pathlib import Path

import pytest
from harnesses.common import run
from harnesses.trainers import TRAINERS

from rollart.conformance.case import Case
from rollart.conformance.trainer import CASES, TrainerHarness


@pytest.mark.parametrize("implementation", TRAINERS)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.usefixtures("forked_ranks")
def test_conforms(case: Case[TrainerHarness, None], implementation: str, tmp_path: Path) -> None:
    run(case, TRAINERS[implementation](tmp_path))
