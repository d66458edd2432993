"""`rollart reward platform` as a process: from zero replicas to several and back, private, each call once."""

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from platform_process import PATIENCE_S, running_platform, wait_for
from served_function import SECRET, call, request, transcript

pytest.importorskip("fastapi", reason="Ray Serve is not installed: make test-functions")
pytestmark = pytest.mark.long
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


@pytest.fixture
def platform(tmp_path):
    (tmp_path / "mine.py").write_text(CODE)
    options = ["--max-replicas=2", "--idle-s=1", "--cpus=0.1"]
    with running_platform("mine.py:gated", tmp_path, SECRET, *options) as running:
        yield running


def calls(folder):
    file = folder / "calls"
    return [tuple(map(int, line.split())) for line in file.read_text().splitlines()] if file.exists() else []


def test_from_zero_to_several_replicas_and_back(platform, tmp_path):
    def post(number, text="42"):
        headers = {"Authorization": f"Bearer {SECRET}"}
        body = request(call(number, transcript(number, text)), deadline_s=PATIENCE_S)
        asked = urllib.request.Request(platform.url, body, headers)
        with urllib.request.urlopen(asked, timeout=PATIENCE_S) as response:
            return json.loads(response.read())

    assert platform.health()["replicas"] == 0
    with ThreadPoolExecutor(12) as pool:
        answers = [pool.submit(post, number) for number in range(1, 9)]
        repeated = [pool.submit(post, number) for number in range(1, 5)]
        # Two replicas hold one call each, and all others wait.
        wait_for(lambda: len({pid for pid, _ in calls(tmp_path)}) == 2)
        assert len(calls(tmp_path)) == 2
        (tmp_path / "gate").touch()
        found = [answer.result() for answer in answers + repeated]
    assert [each["answers"][0]["values"] for each in found] == [[float(n)] for n in [*range(1, 9), *range(1, 5)]]
    assert sorted(trajectory for _, trajectory in calls(tmp_path)) == list(range(1, 9)), "each call ran once"
    assert len({each["instance"] for each in found}) == 2
    report = platform.wait_until_idle()
    assert (report["executed"], report["cold_starts"], report["max_replicas"]) == (8, 2, 2)
    # A replica that dies costs its call an attempt, and the next one starts another.
    (lost,) = post(20, "die")["answers"]
    assert lost["retry"]
    assert "replica was lost" in lost["error"]
    assert post(21)["answers"][0]["values"] == [21.0]
