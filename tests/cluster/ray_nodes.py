"""Ray on the nodes of a test: a head on the first one, raylets on the others."""

import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from nodes import CannotMakeNodes, Network, signal_child, wait_until

pytest.importorskip("ray", reason="Ray is not installed: pip install 'rollart[ray]'")

from rollart.distributed.trial_cluster import MODULE, OBJECT_STORE_BYTES
from rollart.types.placement import ACCELERATOR

PORT = 6380
STARTED, DRAINED = "Ray runtime started.", "finished draining"
START_S = 240.0
DRAIN_S = 150.0
CPU = "cpu"
HERE = Path(__file__).parent
IMPORT_PATH = os.pathsep.join(str(folder) for folder in (HERE, HERE.parent / "distributed"))


class RayNodes:
    """Context manager: a cluster of labelled nodes, of kinds such as H800, H20 and cpu; the first one is the head."""

    def __init__(self, *kinds, cpus=4, gpus=4):
        self.kinds, self._cpus, self._gpus = kinds, cpus, gpus
        self._network = Network(len(kinds))
        self.token = secrets.token_hex(32)
        self._processes = {}
        """`ray_start` of every node."""
        self.nodes = self._network.nodes
        self.head = self.nodes[0]
        self.outside = self._network.outside
        self.address = f"{self.head.address}:{PORT}"
        self.environment = {"RAY_AUTH_TOKEN": self.token, "PYTHONPATH": IMPORT_PATH}
        """What a driver needs."""

    def __enter__(self):
        try:
            self._network.__enter__()
        except CannotMakeNodes as reason:
            pytest.skip(f"cannot make nodes: {reason}")
        try:
            self.start_ray(0)
            starting = [self._starting(number) for number in range(1, len(self.nodes))]
            for number, process in enumerate(starting, 1):
                self._finish(number, process)
        except BaseException:
            self._network.__exit__()
            raise
        return self

    def __exit__(self, *_):
        self._network.__exit__()

    def start_ray(self, number):
        """Start the node's Ray: at the beginning, or again after the node was killed and started."""
        self._finish(number, self._starting(number))

    def _starting(self, number):
        node, kind = self.nodes[number], self.kinds[number]
        where = [f"--address={self.address}"] if number else ["--head", f"--port={PORT}"]
        labels = [] if kind == CPU else [f"--labels={ACCELERATOR}={kind}"]
        resources = [f"--num-cpus={self._cpus}", f"--num-gpus={0 if kind == CPU else self._gpus}"]
        options = [f"--node-ip-address={node.address}", f"--object-store-memory={OBJECT_STORE_BYTES}"]
        command = [
            sys.executable,
            "-m",
            MODULE,
            *where,
            *labels,
            *resources,
            *options,
            "--disable-usage-stats",
            "--block",
        ]
        # Files, not pipes: Ray's processes inherit them.
        with open(node.path("ray.log"), "w") as log:
            return node.popen(*command, env=self.environment, stdout=log, stderr=subprocess.STDOUT)

    def _finish(self, number, process):
        log = self.nodes[number].path("ray.log")

        def started():
            assert process.poll() is None, log.read_text()
            return STARTED in log.read_text()

        wait_until(started, START_S)
        self._processes[number] = process

    def terminate(self, number):
        """SIGTERM to the node's Ray, which drains it; returns once it has ended."""
        process = self._processes.pop(number)
        signal_child(process, signal.SIGTERM)
        process.wait(timeout=DRAIN_S)
        log = self.nodes[number].path("ray.log").read_text()
        assert DRAINED in log, log

    def driver(self, script, *arguments, node=None, **options):
        """Start a script of this folder on a node, by default the head."""
        command = [sys.executable, HERE / script, *arguments]
        return (node or self.head).popen(*command, env=self.environment, **options)
