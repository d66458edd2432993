"""Ctrl-C and SIGTERM, with real processes: the run stops in order, prints how to resume, and leaves nothing behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from real_cli import COMMAND, rollart, small_task

import rollart as api
from rollart.config.load import check, load_toml
from rollart.config.schema import RunConfig

pytestmark = pytest.mark.timeout(1200)
PATIENCE_S = 400.0
"""A busy machine takes its time to start several processes that import torch."""
HANGING_CODEC = """
import threading, time
from rollart.backends.environments.codec import ByteCodec

class Codec(ByteCodec):
    def __init__(self):
        if threading.current_thread() is not threading.main_thread():
            open("hangs", "w").close()
            time.sleep(600)
"""


PATIENT = (
    sys.executable,
    "-c",
    "from rollart.cli.main import main\n"
    "from rollart.distributed.inline import InlineRuntime\n"
    "InlineRuntime.__init__.__kwdefaults__['close_timeout_s'] = 600.0\n"
    "try:\n"
    "    from rollart.distributed.ray_runtime import RayRuntime\n"
    "    RayRuntime.__init__.__kwdefaults__['close_timeout_s'] = 600.0\n"
    "except ImportError:\n"
    "    pass\n"
    "main()",
)
"""The command, with so much time for workers to close that no test outlasts it."""


@contextmanager
def running(folder: Path, *words: str, command: Sequence[str] = COMMAND) -> Iterator[subprocess.Popen[str]]:
    """The command in a process group of its own, as a terminal has it."""
    command = [*command, "train", "config.toml", "--out", "run", *words]
    with (folder / "err").open("w") as err:
        process = subprocess.Popen(
            command,
            cwd=folder,
            stderr=err,
            text=True,
            start_new_session=True,
            # Tests may run in the background of a shell, which then has them ignore it.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_for(folder: Path, word: str, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while word not in (folder / "err").read_text():
        assert process.poll() is None, (folder / "err").read_text()
        assert time.monotonic() < deadline, (folder / "err").read_text()
        time.sleep(0.05)


def descendants(pid: int) -> set[tuple[int, str]]:
    """All processes below one, with their start times: a pid may come again."""
    parents: dict[int, int] = {}
    started: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                parents[int(entry.name)], started[int(entry.name)] = int(fields[1]), fields[19]
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return {(child, started[child]) for child in found - {pid}}


def gone(processes: set[tuple[int, str]]) -> bool:
    """Whether the processes end soon: their watchdogs end them when the command is gone."""
    deadline = time.monotonic() + PATIENCE_S
    left = processes
    while left and time.monotonic() < deadline:
        left = {(pid, start) for pid, start in left if _start(pid) == start}
        time.sleep(0.05)
    return not left


def _start(pid: int) -> str:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]


@pytest.mark.parametrize(
    ("runtime", "number"),
    [("inline", signal.SIGTERM), ("ray", signal.SIGINT), pytest.param("ray", signal.SIGTERM, marks=pytest.mark.long)],
)
def test_a_run_that_is_stopped_says_how_to_go_on(tmp_path: Path, runtime: str, number: signal.Signals) -> None:
    if runtime == "ray":
        pytest.importorskip("ray", reason="Ray is not installed: pip install 'rollart[ray]'")
    small_task(tmp_path)
    with running(tmp_path, "--runtime", runtime, "--set", "steps=100000") as process:
        wait_for(tmp_path, "step 2/", process)
        below = descendants(process.pid)
        assert bool(below) == (runtime == "ray")
        if number is signal.SIGINT:
            os.killpg(process.pid, number)  # to the whole process group, as a terminal does
        else:
            process.send_signal(number)
        assert process.wait(PATIENCE_S) == 1
        assert gone(below)
    err = (tmp_path / "err").read_text()
    assert "Traceback" not in err
    lines = err.splitlines()
    assert "stopping; interrupt again to exit at once" in lines
    assert lines[-1].startswith("rollart: Interrupted: interrupted; the last checkpoint is that of step ")
    assert lines[-1].endswith("Resume with: rollart train --resume run")
    assert "report: run/report.html" in lines
    assert (tmp_path / "run" / "report.html").is_file()
    assert rollart("audit", "run", cwd=tmp_path).code == 0


def test_a_run_that_was_stopped_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_task(tmp_path)
    monkeypatch.chdir(tmp_path)
    with running(tmp_path, "--runtime", "inline", "--set", "steps=100000") as process:
        wait_for(tmp_path, "step 3/", process)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(PATIENCE_S) == 1
    err = (tmp_path / "err").read_text()
    assert "Traceback" not in err
    step = int(err.splitlines()[-1].partition("the last checkpoint is that of step ")[2].partition(".")[0])
    assert step >= 1
    assert api.run(resume="run", steps=step + 2).report.steps == step + 2
    assert rollart("audit", "run", cwd=tmp_path).code == 0


@pytest.mark.parametrize("runtime", ["inline", pytest.param("ray", marks=pytest.mark.long)])
def test_a_second_signal_ends_it_at_once(tmp_path: Path, runtime: str) -> None:
    if runtime == "ray":
        pytest.importorskip("ray", reason="Ray is not installed: pip install 'rollart[ray]'")
    small_task(tmp_path)
    (tmp_path / "slow.py").write_text(HANGING_CODEC)
    with running(tmp_path, "--runtime", runtime, "--set", "codec=slow.py:Codec", command=PATIENT) as process:
        deadline = time.monotonic() + PATIENCE_S
        while not (tmp_path / "hangs").exists():
            assert process.poll() is None, (tmp_path / "err").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        below = descendants(process.pid)
        os.killpg(process.pid, signal.SIGINT)
        wait_for(tmp_path, "stopping", process)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(PATIENCE_S) == 1, "it waits no longer for the worker that hangs"
        assert gone(below)
    assert "Traceback" not in (tmp_path / "err").read_text()


def test_stopped_before_its_first_event_a_run_still_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a model is made, say: there is a folder with a config, and no journal yet."""
    small_task(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    config = check(RunConfig, load_toml(tmp_path / "config.toml"))
    (tmp_path / "run" / "config.json").write_text(config.model_dump_json())
    assert api.run(resume="run").report.steps == 2
