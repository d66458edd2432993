"""gVisor sandboxes pass what they declare of the conformance suite."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollart.backends.sandboxes import gvisor
from rollart.backends.sandboxes.gvisor import GvisorSandboxes
from rollart.conformance.case import Case, NotApplicable
from rollart.conformance.sandbox import CASES, Feature, SandboxHarness
from rollart.types.errors import SandboxFault, SandboxFileError, SandboxLost, SandboxUnavailable
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


def test_what_it_does_not_have_is_refused(sandboxes: GvisorSandboxes) -> None:
    for spec in (SandboxSpec(root=True), SandboxSpec(read_only=(("/data", "/usr"),))):
        with pytest.raises(SandboxUnavailable, match="mounted sockets or folders"):
            sandboxes.create(spec)


def test_a_download_that_is_too_large_is_refused(sandboxes: GvisorSandboxes, tmp_path: Path) -> None:
    sandbox = sandboxes.create(SandboxSpec())
    sandbox.write_file("large", bytes(300_000))
    with pytest.raises(SandboxFileError, match="1000 bytes"):
        sandbox.download(".", tmp_path / "target", max_bytes=1000)
    sandbox.close()


def test_a_frozen_sandbox_is_lost(sandboxes: GvisorSandboxes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gvisor, "ENDING_S", 1.0)
    sandbox = sandboxes.create(SandboxSpec())
    freeze = threading.Event()

    def kernels() -> list[int]:
        lines = {int(path.parent.name): path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")}
        return [pid for pid, line in lines.items() if b"runsc-sandbox" in line and sandbox.name.encode() in line]

    def stop(*_: object) -> None:
        if not freeze.is_set():
            freeze.set()
            for pid in kernels():
                os.kill(pid, signal.SIGSTOP)

    with pytest.raises(SandboxLost):
        sandbox.exec(["sh", "-c", "echo started; sleep 1000"], time_s=5.0, on_output=stop)
    assert freeze.is_set()
    sandbox.reset()
    assert sandbox.exec(["true"]).ok
    sandbox.close()
