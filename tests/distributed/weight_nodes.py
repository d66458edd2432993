"""Nodes of a Ray cluster on this machine, and processes on them that publish and read weights."""

import os
import signal
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rollart.conformance.weights import make
from rollart.distributed import ray_reaper, trial_cluster
from rollart.distributed.ray_calls import answer
from rollart.distributed.ray_cluster import RayCluster

DEADLINE_S = 120
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


@contextmanager
def nodes(count):
    """A trial cluster of its own; yields it and the ids of its nodes, of which the first is that of this process."""
    folder = Path(tempfile.mkdtemp(prefix="rwt-"))
    folder.rmdir()
    before, trial_cluster.folder = trial_cluster.folder, lambda: folder
    try:
        cluster = trial_cluster.up(trial_cluster.parse(f"cpu={count}", cpus=1, gpus=0))
        with RayCluster(cluster.address):
            own = ray.get_runtime_context().get_node_id()
            yield cluster, [own, *(node for node in living() if node != own)]
    finally:
        ray_reaper.reap(str(folder))
        trial_cluster.folder = before


def living():
    return [node["NodeID"] for node in ray.nodes() if node["Alive"]]


def raylet_of(node):
    """Process id of the raylet of a node."""
    socket = next(entry["RayletSocketName"] for entry in ray.nodes() if entry["NodeID"] == node)
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            command = path.read_bytes().split(b"\0")
            if command[0].endswith(b"/raylet") and f"--raylet_socket_name={socket}".encode() in command:
                return int(path.parent.name)
    raise AssertionError(f"no raylet of {node}")


def wait_until(condition):
    deadline = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def gone(pid):
    """Whether a process has ended, reaped or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def kill(pid):
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: gone(pid))


class User:
    """A process that uses a store, such as a trainer or an engine."""

    def __init__(self, store):
        self.store = store

    def pid(self):
        return os.getpid()

    def call(self, method, *arguments):
        result = getattr(self.store, method)(*arguments)
        return bytes(result) if isinstance(result, memoryview) else result

    def publish(self, version, *, dies_after=None):
        """Publish; or die when so many buckets are written, before the next."""
        manifest, buckets = make(version)

        def taken():
            for index, bucket in enumerate(buckets):
                if index == dies_after:
                    os.kill(os.getpid(), signal.SIGKILL)
                yield bucket

        self.store.publish(manifest, taken())

    def read(self, version):
        return [bytes(self.store.bucket(version, index)) for index in range(3)]

    def holder(self):
        """Process id of the holder of this node."""
        return ray.get(self.store._place()[0].holder.ping.remote())


def user(store, node):
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(num_cpus=0)(User).options(scheduling_strategy=strategy).remote(store)


def result(reference):
    return answer(reference, DEADLINE_S)


class RemoteStore:
    """A store as seen by a process on another node."""

    def __init__(self, store, node):
        self._user = user(store, node)

    def __getattr__(self, method):
        return lambda *arguments: result(self._user.call.remote(method, *arguments))
