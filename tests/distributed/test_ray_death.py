"""The death of Ray itself: reported once, within a second, without waiting for it."""

import json
import signal
from pathlib import Path

import pytest
from ray_workers import wait_until
from test_ray_runtime import controller, safe_text

pytest.importorskip("ray", reason="Ray is not installed: pip install 'rollart[ray]'")

DEATH = """
import asyncio, json, os, signal, sys, time
from pathlib import Path
from rollart.distributed.ray_local import LocalRay, vital_processes
from rollart.distributed.ray_runtime import RayRuntime
from rollart.types.errors import RuntimeLost
from test_ray_runtime import RecordingListener, spawn
from ray_workers import score

async def main(local, runtime, listener):
    runtime.listen(listener)
    for worker in ("a", "b"):
        spawn(runtime, worker)
    await listener.until(lambda: len(listener.joins) == 2)
    victim = dict(vital_processes())[sys.argv[1]]
    os.kill(victim.pid, signal.SIGKILL)
    began = time.monotonic()
    spawn(runtime, "pending")  # nothing will ever start it, and to kill it would block
    runtime.stop("pending")
    await listener.until(lambda: listener.failures)
    noticed_s = time.monotonic() - began
    spawn(runtime, "late")
    runtime.post("a", [score("echo")])
    runtime.stop("b")
    await runtime.close()
    return victim.pid, noticed_s

local = LocalRay(logs=Path("ray-logs"))
runtime, listener = RayRuntime(Path("logs"), local=local), RecordingListener()
with local:
    pid, noticed_s = asyncio.run(main(local, runtime, listener))
assert all(isinstance(error, RuntimeLost) for error in listener.failures)
report = {
    "pid": pid,
    "noticed_s": noticed_s,
    "failures": [str(error) for error in listener.failures],
    "deaths": listener.deaths,
    "folder": local.folder,
}
print(json.dumps(report))
"""


@pytest.mark.parametrize("process", ["raylet", "GCS server"])
def test_the_runtime_fails_once_and_closes(process, tmp_path):
    done = controller(DEATH, process, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["failures"] == [f"Ray's {process} (pid {report['pid']}) of this run died (killed by SIGKILL)"]
    assert report["deaths"] == {}
    assert report["noticed_s"] < 10  # a fraction of a second, on a machine that has nothing else to do
    assert done.stderr == ""
    wait_until(lambda: not Path(report["folder"]).exists())
    assert not [path for path in Path("/proc").glob("[0-9]*/cmdline") if report["folder"] in safe_text(path)]
    assert {"raylet.out", "gcs_server.out"} <= {log.name for log in (tmp_path / "ray-logs").iterdir()}


AT_START = """
import os, signal, sys, threading, time
from rollart.distributed import ray_local

ray_local.LAST_RESORT_S = 1.0

def kill_early():
    while sys.argv[1] not in (found := dict(ray_local.vital_processes())):
        time.sleep(0.001)
    os.kill(found[sys.argv[1]].pid, signal.SIGKILL)

threading.Thread(target=kill_early).start()
with ray_local.LocalRay(advice="Start again."):
    print("up")
    time.sleep(600)
"""


@pytest.mark.parametrize("process", ["raylet", "GCS server"])
def test_a_ray_that_dies_while_it_starts_holds_nobody_up(process, tmp_path):
    done = controller(AT_START, process, cwd=tmp_path)
    assert done.returncode == 1
    assert "RuntimeLost: Ray's " + process in done.stderr
    assert signal.SIGKILL.name in done.stderr
