"""Every prompt source keeps the promises of its port."""

import pytest
from harnesses.common import run
from harnesses.prompt_sources import PROMPT_SOURCES

from rollart.conformance.case import Case
from rollart.conformance.prompts import CASES, PromptSourceHarness


@pytest.mark.parametrize("implementation", PROMPT_SOURCES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_conforms(case: Case[PromptSourceHarness, None], implementation: str) -> None:
    run(case, PROMPT_SOURCES[implementation]())
