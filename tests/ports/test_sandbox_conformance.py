"""Every source of sandboxes keeps the promises of its port."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from harnesses.common import run
from sandbox_parts import kill, own_sandboxes, public_folder, users_sandboxes

from rollart.conformance.case import Case
from rollart.conformance.sandbox import CASES, SandboxHarness
from rollart.ports.sandbox import Sandboxes

OPENERS = {"bubblewrap": own_sandboxes, "bubblewrap-as-user": users_sandboxes}


@pytest.fixture(scope="module", params=OPENERS)
def sandboxes(request: pytest.FixtureRequest) -> Iterator[Sandboxes]:
    """Started once, because its launcher and warm pool are to be shared by many sandboxes."""
    with ExitStack() as stack:
        folder = stack.enter_context(public_folder())
        yield stack.enter_context(OPENERS[request.param](folder / "sandboxes"))
        assert [path.name for path in (folder / "sandboxes").iterdir() if "launcher-" in path.name]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_conforms(case: Case[SandboxHarness, None], sandboxes: Sandboxes, tmp_path: Path) -> None:
    run(case, SandboxHarness(sandboxes=sandboxes, scratch=tmp_path, kill=kill))
