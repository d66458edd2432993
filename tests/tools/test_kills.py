"""SIGKILL in real runs, a few of the seeds of `make kills`: the run goes on, and nothing is left of what was killed."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "kills.py"


@pytest.fixture(scope="module")
def kills() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kills", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["kills"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*words: str) -> dict[str, object]:
    """In a process of its own, because it adopts orphans."""
    done = subprocess.run(
        [sys.executable, TOOL, "--json", *words], capture_output=True, text=True, timeout=580, check=False
    )
    assert done.returncode == 0, done.stderr
    summary: dict[str, object] = json.loads(done.stdout)
    return summary


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(20, id="everything while the run starts"),
        pytest.param(25, id="the raylet after a step", marks=pytest.mark.long),
    ],
)
@pytest.mark.timeout(600)
def test_a_run_goes_on_after_a_kill(seed: int) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'rollart[ray]'")
    summary = run("--seeds", "1", "--from", str(seed))
    assert summary["clean"] == 1
    assert summary["resumed"] == 1
    assert not summary["missed"]


@pytest.mark.parametrize("runtime", ["ray", "cluster"])
def test_28_seeds_kill_everybody_at_every_moment(kills: ModuleType, runtime: str) -> None:
    for first in (0, 7):
        firsts = [kills.plan(first + n, runtime).kills[0] for n in range(28)]
        pairs = {(kill.target, kill.when) for kill in firsts}
        assert len(pairs) == len(set(kills.KINDS[runtime])) * len(kills.When)
    assert kills.plan(3, "ray") == kills.plan(3, "ray")
    assert all(
        kill.target is kills.Target.CONTROLLER for seed in range(20) for kill in kills.plan(seed, "inline").kills
    )


PARENT = """
import subprocess, sys
quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], **quiet).pid)
"""
GRANDPARENT = """
import subprocess, sys
import kills
kills.adopt_orphans()
orphan = int(subprocess.run([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE).stdout)
assert kills.descendants(None) == [orphan]
assert kills.kill(orphan)
assert kills.within(60, lambda: not kills.descendants(None) and not kills.kill(orphan))
"""


def test_orphans_are_found_and_buried() -> None:
    """In a process of its own, because it adopts them."""
    command = [sys.executable, "-c", GRANDPARENT, PARENT]
    done = subprocess.run(command, cwd=TOOL.parent, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
