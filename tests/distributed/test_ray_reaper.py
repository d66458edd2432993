"""The reaper needs no Ray: what it ends, and what it leaves alone."""

import os
import subprocess
import sys

import pytest
from ray_workers import runs, wait_until

from rollart.distributed import ray_reaper


@pytest.fixture
def sleeper():
    started = []

    def start(title="sleeper", **options):
        code = "import time\ntime.sleep(600)"
        started.append(subprocess.Popen([title, "-c", code], executable=sys.executable, **options))
        return started[-1].pid

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_it_ends_what_is_marked_when_the_controller_is_gone(sleeper, tmp_path):
    folder, other = tmp_path / "ours", tmp_path / "ours-too"
    folder.mkdir()
    other.mkdir()
    with (folder / "log").open("w") as log, (other / "log").open("w") as others_log:
        marked = sleeper(env={**os.environ, ray_reaper.MARK: str(folder)})
        titled = sleeper("ray::Agent", stdout=log)
        spared = [
            sleeper(env={**os.environ, ray_reaper.MARK: str(other)}),
            sleeper("ray::Agent", stdout=others_log),
            sleeper("reader", stdout=log),
        ]
    wait_until(lambda: set(ray_reaper.processes(str(folder))) == {marked, titled})
    reaper = subprocess.Popen([sys.executable, "-I", "-S", ray_reaper.__file__, folder], stdin=subprocess.PIPE)
    with pytest.raises(subprocess.TimeoutExpired):
        reaper.wait(0.3)
    assert runs(marked)
    reaper.communicate(timeout=20)  # closes its input, as the end of the controller does
    assert reaper.returncode == 0
    assert not runs(marked)
    assert not runs(titled)
    assert all(runs(process) for process in spared)
    assert not folder.exists()
    assert other.exists()
