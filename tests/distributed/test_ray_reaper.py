"""The reaper needs no Ray: what it ends, and what it leaves alone."""

import os
import subprocess
import sys
from pathlib import Path

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
        titled = {sleeper(title, stdout=log) for title in ("ray::Agent", "rollart: engine H20/0.0")}
        spared = [
            sleeper(env={**os.environ, ray_reaper.MARK: str(other)}),
            sleeper("ray::Agent", stdout=others_log),
            sleeper("reader", stdout=log),
        ]
    wait_until(lambda: set(ray_reaper.processes(str(folder))) == {marked, *titled})
    reaper = subprocess.Popen([sys.executable, "-I", "-S", ray_reaper.__file__, folder], stdin=subprocess.PIPE)
    with pytest.raises(subprocess.TimeoutExpired):
        reaper.wait(0.3)
    assert runs(marked)
    reaper.communicate(timeout=100)  # closes its input, as the end of the controller does
    assert reaper.returncode == 0
    wait_until(lambda: not runs(marked) and not any(map(runs, titled)))
    assert all(runs(process) for process in spared)
    assert not folder.exists()
    assert other.exists()


def test_what_it_ends_leaves_no_shared_memory_behind(tmp_path):
    code = """
import time
from multiprocessing.shared_memory import SharedMemory
print(SharedMemory(create=True, size=1).name, flush=True)
time.sleep(600)
"""
    environment = {**os.environ, ray_reaper.MARK: str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True) as holder:
        memory = Path("/dev/shm") / holder.stdout.readline().strip()
        assert memory.is_file()
        ray_reaper.reap(str(tmp_path))
    assert not memory.exists()


def test_the_next_ray_ends_what_a_killed_reaper_left(sleeper, tmp_path):
    """A Ray whose controller lives is left alone, and so is a folder without an owner."""
    dead, living, strange = (tmp_path / f"{ray_reaper.PREFIX}{name}" for name in ("dead", "living", "strange"))
    for folder in (dead, living, strange):
        folder.mkdir()
    os.close(ray_reaper.own(str(dead)))
    held = ray_reaper.own(str(living))
    left, *spared = (sleeper(env={**os.environ, ray_reaper.MARK: str(folder)}) for folder in (dead, living, strange))
    wait_until(lambda: ray_reaper.processes(str(dead)) == [left])
    ray_reaper.reap_orphans(str(tmp_path))
    wait_until(lambda: not runs(left))
    assert all(runs(process) for process in spared)
    assert sorted(tmp_path.iterdir()) == [living, strange]
    os.close(held)
    ray_reaper.reap_orphans(str(tmp_path))
    assert sorted(tmp_path.iterdir()) == [strange]


def test_one_that_was_only_just_forked_is_found_at_the_second_look(sleeper, monkeypatch, tmp_path):
    late = sleeper()
    found = iter([[], [late], [], []])
    monkeypatch.setattr(ray_reaper, "processes", lambda _folder: next(found))
    ray_reaper.reap(str(tmp_path / "ray"))
    wait_until(lambda: not runs(late))
