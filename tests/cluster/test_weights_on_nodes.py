"""The weight store between machines that share nothing: each has its own /dev/shm."""

import subprocess
import time

import pytest
from ray_nodes import RayNodes

from rollart.conformance.weights import make
from rollart.types.versions import Version

CUT_S = 5.0


class Driver:
    def __init__(self, cluster):
        self._log = cluster.head.path("driver.log")
        with self._log.open("w") as log:
            self._process = cluster.driver("weights_driver.py", cluster.address, stdin=subprocess.PIPE, stderr=log)
        self.answer("ready")

    def answer(self, start):
        line = self._process.stdout.readline()
        assert line.startswith(start), f"{line!r}\n{self._log.read_text()}"
        return line.split()[1:]

    def do(self, command, node, step=None):
        self._process.stdin.write(" ".join(str(part) for part in (command, node, step) if part is not None) + "\n")
        self._process.stdin.flush()
        return self.answer("forgotten" if command == "forget" else command)

    def publish(self, node, step):
        self.do("publish", node, step)

    def reads(self, node, step):
        expected = sum(sum(bucket) for bucket in make(Version(0, step))[1])
        return self.do("read", node, step) == [str(expected)]

    def close(self):
        self._process.communicate("quit\n", timeout=100)


@pytest.fixture
def cluster():
    with RayNodes("cpu", "cpu", "cpu") as cluster:
        yield cluster


def test_versions_reach_nodes_that_share_nothing_and_outlive_cuts_and_dead_nodes(cluster):
    driver = Driver(cluster)
    driver.publish(1, 1)
    assert driver.reads(2, 1)
    assert driver.reads(0, 1)
    stores = [[path.name for path in node.shared_memory.glob("rollart-nodes-*")] for node in cluster.nodes]
    assert [len(found) for found in stores] == [1, 1, 1]

    cluster.nodes[2].cut()
    until = time.monotonic() + CUT_S
    driver.publish(1, 2)  # does not wait for the node behind the cut
    time.sleep(max(0, until - time.monotonic()))
    cluster.nodes[2].restore()
    assert driver.reads(2, 2)

    cluster.nodes[1].power_off()
    driver.do("forget", 1)
    assert driver.reads(0, 2)
    assert driver.reads(2, 2)
    driver.publish(2, 3)
    assert driver.reads(0, 3)
    cluster.nodes[1].start()
    cluster.start_ray(1)
    assert driver.reads(1, 3)
    driver.close()
