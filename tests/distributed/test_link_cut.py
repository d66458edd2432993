"""Links over a network that is cut: two network namespaces joined by a cable, which is pulled.

Needs root and iproute2; skipped elsewhere.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

END = Path(__file__).with_name("link_end.py")
CONTROLLER_HOST, WORKER_HOST = "10.99.0.1", "10.99.0.2"
CUT_S = 5.0
IMPATIENT = {"KEEPALIVE_IDLE_S": 1, "KEEPALIVE_INTERVAL_S": 1, "KEEPALIVE_PROBES": 1, "VANISHED_S": 2}


def ip(*arguments):
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True)


class End:
    """A process at one end of the cable."""

    def __init__(self, namespace, *arguments):
        command = ["ip", "netns", "exec", namespace, sys.executable, str(END), *arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def tell(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def hear(self):
        line = self.process.stdout.readline()
        assert line, "the process ended without its report; see the captured standard error"
        return json.loads(line)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()


class Cable:
    """Joins two namespaces, each with one address."""

    def __init__(self, cleanup):
        self.near, self.far = (f"rollart-{os.getpid()}-{end}" for end in ("near", "far"))
        for namespace in (self.near, self.far):
            ip("netns", "add", namespace)
            cleanup.callback(ip, "netns", "del", namespace)
            ip("netns", "exec", namespace, "true")
        # Made inside, so that its ends cannot collide with interfaces of this machine.
        ip("-n", self.near, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", self.far)
        for namespace, host in ((self.near, CONTROLLER_HOST), (self.far, WORKER_HOST)):
            ip("-n", namespace, "address", "add", f"{host}/24", "dev", "cable")
            ip("-n", namespace, "link", "set", "cable", "up")

    def pull(self):
        ip("-n", self.near, "link", "set", "cable", "down")

    def plug_in(self):
        ip("-n", self.near, "link", "set", "cable", "up")


@pytest.fixture
def cable():
    if shutil.which("ip") is None:
        pytest.skip("needs `ip` of iproute2")
    with ExitStack() as cleanup:
        try:
            made = Cable(cleanup)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"needs network namespaces: {error.stderr.strip()}")
        yield made


@pytest.fixture
def ends(cable, request):
    """Both ends, while blobs stream in both directions."""
    settings = json.dumps(getattr(request, "param", {}))
    with (
        End(cable.near, "controller", CONTROLLER_HOST, settings) as controller,
        End(cable.far, "worker", WORKER_HOST, settings) as worker,
    ):
        worker.tell(json.dumps(controller.hear()))
        for end in (controller, worker):
            assert end.hear() == {"streaming": True}
        yield controller, worker


def test_a_cut_of_some_seconds_only_delays(cable, ends):
    cable.pull()
    time.sleep(CUT_S)  # the fault itself; nothing is waited for
    cable.plug_in()
    for end in ends:
        end.tell("finish")
    here, there = (end.hear() for end in ends)
    for report, other in ((here, there), (there, here)):
        assert report["in_order"]
        assert report["received"] == other["sent"]
        assert not report["closed"]
        assert report["gap_s"] > CUT_S / 2, "the cut was none"


@pytest.mark.parametrize("ends", [IMPATIENT], indirect=True, ids=["impatient"])
def test_a_machine_that_vanishes_closes_the_link(cable, ends):
    """The worker's end is idle and notices by its probes, the controller's by data that is not acknowledged."""
    controller, worker = ends
    worker.tell("pause")
    assert worker.hear() == {"paused": True}
    cable.pull()
    assert worker.hear()["closed"]
    assert controller.hear()["closed"]
