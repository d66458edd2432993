"""`rollart reward platform` as a process: from zero replicas to several and back, private, each call once."""

import json
import os
import re
import signal
import subprocess
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from real_cli import COMMAND
from served_function import SECRET, call, request, transcript

pytest.importorskip("fastapi", reason="Ray Serve is not installed: make test-functions")
pytestmark = pytest.mark.long
PATIENCE_S = 400.0
READY = re.compile(r"serving \S+ at (http://127\.0\.0\.1:\d+)")
CODE = """
import os, threading, time
from pathlib import Path
import rollart

GATE = Path(__file__).with_name("gate")
CALLS = Path(__file__).with_name("calls")


def gated(t: rollart.Transcript) -> float:
    with CALLS.open("a") as file:
        file.write(f"{os.getpid()} {t.trajectory}\\n")
    if t.final_text == "die":
        os._exit(1)
    while not GATE.exists():
        time.sleep(0.02)
    return float(t.trajectory)
"""


class Platform:
    def __init__(self, folder):
        self.folder = folder
        (folder / "mine.py").write_text(CODE)
        options = ["--port=0", "--max-replicas=2", "--idle-s=1", "--cpus=0.1", "--secret-env=MY_SECRET"]
        self.process = subprocess.Popen(
            [*COMMAND, "reward", "platform", "mine.py:gated", *options],
            cwd=folder,
            env=os.environ | {"MY_SECRET": SECRET},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.said = ""
        for line in self.process.stderr:
            self.said += line
            found = READY.search(line)
            if found:
                self.url = found[1]
                break
        else:
            raise AssertionError(self.said)
        threading.Thread(target=self.process.stderr.read, daemon=True).start()

    def post(self, number, text="42"):
        headers = {"Authorization": f"Bearer {SECRET}"}
        body = request(call(number, transcript(number, text)), deadline_s=PATIENCE_S)
        asked = urllib.request.Request(self.url, body, headers)
        with urllib.request.urlopen(asked, timeout=PATIENCE_S) as response:
            return json.loads(response.read())

    def health(self):
        with urllib.request.urlopen(f"{self.url}/health", timeout=PATIENCE_S) as response:
            return json.loads(response.read())

    def wait_for(self, condition):
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.2)

    def calls(self):
        file = self.folder / "calls"
        return [tuple(map(int, line.split())) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.fixture
def platform(tmp_path):
    made = Platform(tmp_path)
    try:
        yield made
    finally:
        made.process.send_signal(signal.SIGTERM)
        assert made.process.wait(PATIENCE_S) == 0


def test_from_zero_to_several_replicas_and_back(platform):
    assert platform.health()["replicas"] == 0
    with ThreadPoolExecutor(12) as pool:
        answers = [pool.submit(platform.post, number) for number in range(1, 9)]
        repeated = [pool.submit(platform.post, number) for number in range(1, 5)]
        # Two replicas hold one call each, and all others wait.
        platform.wait_for(lambda: len({pid for pid, _ in platform.calls()}) == 2)
        assert len(platform.calls()) == 2
        (platform.folder / "gate").touch()
        found = [answer.result() for answer in answers + repeated]
    assert [each["answers"][0]["values"] for each in found] == [[float(n)] for n in [*range(1, 9), *range(1, 5)]]
    assert sorted(trajectory for _, trajectory in platform.calls()) == list(range(1, 9)), "each call ran once"
    assert len({each["instance"] for each in found}) == 2
    platform.wait_for(lambda: platform.health()["replicas"] == 0)
    report = platform.health()
    assert (report["executed"], report["cold_starts"], report["max_replicas"]) == (8, 2, 2)
    # A replica that dies costs its call an attempt, and the next one starts another.
    (lost,) = platform.post(20, "die")["answers"]
    assert lost["retry"]
    assert "replica was lost" in lost["error"]
    assert platform.post(21)["answers"][0]["values"] == [21.0]
