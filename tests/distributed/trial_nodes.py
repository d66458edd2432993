"""A trial cluster of a test module's own, and what tests do to its nodes."""

import os
import shutil
import signal
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest

from rollart.distributed import ray_reaper, trial_cluster
from rollart.distributed.code_travel import Code
from rollart.distributed.ray_cluster import RayCluster


@contextmanager
def trial_nodes(nodes: str, *, cpus: int, gpus: int = 0):
    """The nodes, with this process connected to them. In a folder of its own: there may be another trial cluster."""
    own = tempfile.mkdtemp(prefix="rl-")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial_cluster, "folder", lambda: Path(own, "cluster"))
        code = Path(own, "code")
        code.mkdir()
        try:
            cluster = trial_cluster.up(trial_cluster.parse(nodes, cpus=cpus, gpus=gpus))
            with RayCluster("auto", Code(code, (), ())):
                yield cluster
        finally:
            trial_cluster.down()
            shutil.rmtree(own, ignore_errors=True)


def kill_raylet(node_id: str) -> None:
    """Kill the raylet of a node, as if its machine lost power; its workers notice and exit."""
    for pid in ray_reaper.processes(str(trial_cluster.folder())):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if b"raylet/raylet" in command and node_id.encode() in command:
            os.kill(pid, signal.SIGKILL)
            return
    raise AssertionError(f"no raylet of node {node_id}")
