"""A run whose Ray dies: it ends at once and with a reason, leaves nothing behind, and goes on when it is resumed."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from real_cli import COMMAND, rollart, small_task

from rollart.observe.journal import read_journal
from rollart.types.errors import RequestError
from rollart.types.journal import CheckpointSaved, RunEnded, StepTrained, WorkerDied

pytest.importorskip("ray", reason="Ray is not installed: pip install 'rollart[ray]'")

ENDS_S = 30.0


def children(pid: int) -> dict[int, str]:
    """The processes below a process, at any depth, with their titles."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # gone meanwhile
    below = [pid]
    for each in below:
        below += [child for child, parent in parents.items() if parent == each]
    return {each: title(each) for each in below[1:]}


def title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return ""


def started(pid: int) -> float | None:
    """When a living process started: a number may be given to another one later."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else float(rest[18])


def wait_until(condition: Callable[[], object], limit_s: float = 100.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def saved(journal: Path) -> bool:
    try:
        return journal.is_file() and any(isinstance(event, CheckpointSaved) for event in read_journal(journal))
    except RequestError:
        return False  # it has no tables yet


@pytest.mark.parametrize(
    ("program", "name"),
    [("raylet", "raylet"), pytest.param("gcs_server", "GCS server", marks=pytest.mark.long)],
)
@pytest.mark.timeout(240)
def test_a_run_without_its_ray_ends_with_a_reason_and_can_be_resumed(program: str, name: str, tmp_path: Path) -> None:
    small_task(tmp_path)
    run, log = tmp_path / "run", tmp_path / "log"
    words = ["train", "config.toml", "--out", "run", "--json", "--set", "steps=10000"]
    with log.open("wb") as stderr:
        controller = subprocess.Popen([*COMMAND, *words], cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=stderr)
    try:
        wait_until(lambda: controller.poll() is not None or saved(run / "journal.sqlite"))
        family = children(controller.pid)
        assert {each for each in family.values() if each.startswith("rollart: ")} == {
            "rollart: engine local/0.0",
            "rollart: environment maze/0.0",
            "rollart: reward maze/0.0",
            "rollart: trainer 0.0",
        }
        births = {pid: started(pid) for pid in family}
        (victim,) = [pid for pid, each in family.items() if Path(each.partition(" ")[0]).name == program]
        os.kill(victim, signal.SIGKILL)
        began = time.monotonic()
        assert controller.wait(ENDS_S) == 1
        assert time.monotonic() - began < ENDS_S
    finally:
        controller.kill()
        controller.wait()

    cause = f"RuntimeLost: Ray's {name} (pid {victim}) of this run died (killed by SIGKILL)"
    lines = log.read_text().splitlines()
    sentences = [line for line in lines if not line.startswith(("run folder", "step ", "report"))]
    assert len(sentences) == 1, sentences
    assert sentences[0].startswith(f"rollart: {cause}; the last checkpoint is that of step ")
    assert sentences[0].endswith("Resume with: rollart train --resume run")
    *_, end = events = list(read_journal(run / "journal.sqlite"))
    assert isinstance(end, RunEnded)
    assert end.reason == cause
    assert not [event for event in events if isinstance(event, WorkerDied)]
    assert [pid for pid, birth in births.items() if birth is not None and started(pid) == birth] == []

    done = max(event.version.step for event in events if isinstance(event, StepTrained))
    resumed = rollart("train", "--resume", "run", "--json", "--set", f"steps={done + 2}", cwd=tmp_path)
    assert resumed.code == 0, resumed.err
    assert rollart("audit", "run", cwd=tmp_path).code == 0
