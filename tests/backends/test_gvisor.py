"""gVisor sandboxes pass what they declare of the conformance suite."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rollart.backends.sandboxes.gvisor import GvisorSandboxes
from rollart.conformance.case import Case, NotApplicable
from rollart.conformance.sandbox import CASES, Feature, SandboxHarness
from rollart.types.errors import SandboxFault, SandboxUnavailable
from rollart.types.sandboxes import SandboxSpec

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def sandboxes() -> Iterator[GvisorSandboxes]:
    try:
        made = GvisorSandboxes()
    except SandboxUnavailable as reason:
        pytest.skip(str(reason))
    try:
        sandbox = made.create(SandboxSpec())
        works = sandbox.exec(["true"])
    except SandboxFault as error:
        made.close()
        pytest.skip(f"runsc does not work on this kernel: {error}")
    assert works.ok
    yield made
    made.close()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_conforms(case: Case[SandboxHarness, None], sandboxes: GvisorSandboxes, tmp_path: Path) -> None:
    features = frozenset({Feature.EXACT_OUTPUT})
    try:
        case.run(SandboxHarness(sandboxes=sandboxes, scratch=tmp_path, features=features))
    except NotApplicable as reason:
        pytest.skip(str(reason))


def test_the_kernel_is_another(sandboxes: GvisorSandboxes) -> None:
    sandbox = sandboxes.create(SandboxSpec())
    assert b"gVisor" in sandbox.exec(["dmesg"]).stdout
    for command in (["touch", "/usr/planted"], ["sh", "-c", "exec 3<>/dev/tcp/1.1.1.1/80"]):
        assert not sandbox.exec(command).ok
    sandbox.close()
