"""Sources of sandboxes for tests: with all that root has, as an ordinary user, and without overlays and cgroups.
And what is left of sandboxes on this machine."""

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import rollart
from rollart.backends.sandboxes import connection
from rollart.backends.sandboxes.bubblewrap import BubblewrapSandbox, BubblewrapSandboxes
from rollart.ports.sandbox import Sandbox, Sandboxes
from rollart.types.errors import SandboxUnavailable

ORDINARY_USER = 12345
DEADLINE_S = 90.0
SYSTEM_PYTHON = Path("/usr/bin/python3")


def kill(sandbox: Sandbox) -> None:
    """Kill the keeper, as an administrator or the kernel would."""
    assert isinstance(sandbox, BubblewrapSandbox)
    os.kill(sandbox.process, signal.SIGKILL)


@contextmanager
def own_sandboxes(folder: Path, warm: int = 0, makers: int = 2) -> Iterator[BubblewrapSandboxes]:
    """As this user."""
    with BubblewrapSandboxes(folder, warm=warm, makers=makers) as sandboxes:
        usable(sandboxes)
        yield sandboxes


@contextmanager
def users_sandboxes(folder: Path) -> Iterator[BubblewrapSandboxes]:
    """As an ordinary user, with a copy of the launcher's code and an interpreter that this user may read."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    if not SYSTEM_PYTHON.exists():
        pytest.skip(f"{SYSTEM_PYTHON} is missing, and other interpreters may not be readable for other users")
    with ExitStack() as stack:
        source = Path(tempfile.mkdtemp(prefix="rollart-source-"))
        stack.callback(shutil.rmtree, source)
        source.chmod(0o755)
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(Path(rollart.__file__).parent, source / "rollart", ignore=ignored)
        patched = stack.enter_context(pytest.MonkeyPatch.context())
        patched.setattr(connection, "SOURCE", source)
        patched.setattr(connection, "INTERPRETER", str(SYSTEM_PYTHON))
        sandboxes = stack.enter_context(BubblewrapSandboxes(folder, warm=0, makers=2, as_user=ORDINARY_USER))
        usable(sandboxes)
        yield sandboxes


def usable(sandboxes: Sandboxes) -> None:
    """Skip where this machine cannot make sandboxes."""
    try:
        sandboxes.mechanisms()
    except SandboxUnavailable as reason:
        pytest.skip(str(reason))


@contextmanager
def public_folder() -> Iterator[Path]:
    """Reachable for other users, which the folders of tests are not."""
    folder = Path(tempfile.mkdtemp(prefix="rollart-test-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


# --- what is left on the machine ------------------------------------------------------------------------------------


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"not in {DEADLINE_S:g} s: {what}"
        time.sleep(0.02)


def processes(folder: Path) -> list[int]:
    """Launchers of a folder, what bubblewrap started there, and all their descendants."""
    table: dict[int, tuple[int, bytes]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                table[int(entry.name)] = (int(fields[1]), (entry / "cmdline").read_bytes())
            except OSError:
                continue
    found = {pid for pid, (_, line) in table.items() if str(folder).encode() in line and b"launcher.main" in line}
    found |= {pid for pid, (_, line) in table.items() if str(folder).encode() in line and b"bwrap" in line}
    for _ in range(len(table)):
        more = {pid for pid, (parent, _) in table.items() if parent in found} - found
        if not more:
            break
        found |= more
    return sorted(found)


def keeper_is_gone(process: int) -> bool:
    try:
        return b"keeper" not in Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return True


def groups(names: list[str]) -> list[str]:
    return [str(path) for path in Path("/sys/fs/cgroup").glob("**/launcher-*") if path.name.partition(".")[0] in names]


def launchers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith("launcher-")]


def sandbox_folders(folder: Path) -> list[str]:
    return [path.name for launcher in launchers(folder) for path in (folder / launcher).iterdir() if "." in path.name]


def mounts() -> list[str]:
    return [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if "/launcher-" in line]
