"""A vLLM engine closes within the five seconds of a stopped worker, and leaves nothing, however it ends."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: `make test-vllm` runs it in an environment of its own")

import psutil
from vllm_parts import model_folder, settings

from rollart.backends.engines.vllm import VllmEngineSettings
from rollart.backends.engines.vllm_core import VllmCore
from rollart.distributed.ray_runtime import CLOSE_TIMEOUT_S

START_AND_DIE = """
import json, os, signal, sys
import psutil
from rollart.backends.engines.vllm import VllmEngineSettings
from rollart.backends.engines.vllm_core import VllmCore

if __name__ == "__main__":
    core = VllmCore(VllmEngineSettings.model_validate_json(sys.argv[1]).vllm_arguments())
    core.listen(lambda _event: None)
    print(json.dumps([child.pid for child in psutil.Process().children(recursive=True)]), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def memory_of(process: psutil.Process) -> set[Path]:
    """The named shared memory that a process has mapped."""
    maps = Path(f"/proc/{process.pid}/maps").read_text()
    return {Path(name) for name in re.findall(r"/dev/shm/psm_\w+", maps)}


def end_of(processes: list[psutil.Process], within_s: float) -> list[psutil.Process]:
    """Those that are still there."""
    return psutil.wait_procs(processes, timeout=within_s)[1]


@pytest.mark.parametrize("hangs", [False, True], ids=["idle", "the core hangs"])
def test_it_closes_in_time(tmp_path: Path, hangs: bool) -> None:
    before = set(psutil.Process().children(recursive=True))
    options = VllmEngineSettings.model_validate(settings(model_folder(tmp_path / "model"), None))
    core = VllmCore(options.vllm_arguments())
    core.listen(lambda _event: None)
    started = set(psutil.Process().children(recursive=True)) - before
    engine = [process for process in started if "VLLM::" in process.name()]
    assert len(engine) == 2, "a core and a rank"
    memory = set().union(*map(memory_of, engine))
    assert memory
    if hangs:
        for process in engine:
            os.kill(process.pid, signal.SIGSTOP)
    began = time.monotonic()
    core.close()
    assert time.monotonic() - began < CLOSE_TIMEOUT_S
    assert not end_of(engine, CLOSE_TIMEOUT_S)
    if not hangs:  # what a killed core leaves goes with the process that owned it, as below
        assert not [path for path in memory if path.exists()]


def test_it_ends_with_its_owner(tmp_path: Path) -> None:
    options = VllmEngineSettings.model_validate(settings(model_folder(tmp_path / "model"), None)).model_dump_json()
    script = tmp_path / "start_and_die.py"  # a file, because vLLM's processes import the main module
    script.write_text(START_AND_DIE)
    with subprocess.Popen([sys.executable, script, options], stdout=subprocess.PIPE, text=True) as owner:
        line = next(line for line in owner.stdout if line.startswith("["))
        left = [psutil.Process(pid) for pid in json.loads(line) if psutil.pid_exists(pid)]
        assert not end_of(left, 60)
    assert owner.returncode == -signal.SIGKILL
