"""`rollart reward platform` as a process: from zero replicas to several and back, private, each call once."""

import asyncio
import itertools
import json
import os
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from platform_process import PATIENCE_S, running_platform, wait_for
from served_function import SECRET, call, request, transcript

from rollart.distributed import serve_platform
from rollart.distributed.serve_platform import ServePlatform

pytest.importorskip("fastapi", reason="Ray Serve is not installed: make test-functions")
pytestmark = pytest.mark.long
LOOPBACK = "0100007F"
"""End of 127.0.0.1 and of ::ffff:127.0.0.1 in /proc/net, on a little-endian machine."""
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
    while not GATE.exists() and not GATE.with_name(f"gate {t.trajectory}").exists():
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


@pytest.fixture
def post(platform):
    def post(number, text="42"):
        headers = {"Authorization": f"Bearer {SECRET}"}
        body = request(call(number, transcript(number, text)), deadline_s=PATIENCE_S)
        asked = urllib.request.Request(platform.url, body, headers)
        with urllib.request.urlopen(asked, timeout=PATIENCE_S) as response:
            return json.loads(response.read())

    return post


def listens_on(pid):
    """Addresses on which a process listens, as the kernel writes them."""
    links = [os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir()]
    lines = [
        line.split() for kind in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()
    ]
    return {line[1].split(":")[0] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in links}


def test_replicas_are_counted_again_after_an_error(monkeypatch):
    from ray.serve.exceptions import RayServeException

    async def whole():
        loop, counted, counts = asyncio.get_running_loop(), asyncio.Event(), itertools.count()

        class Flaky(ServePlatform):
            def _count(self):
                match next(counts):
                    case 0:
                        raise RayServeException("the controller starts again")
                    case 2:
                        loop.call_soon_threadsafe(counted.set)
                return 2

        platform = Flaky(None, "")
        watching = asyncio.create_task(platform.watch())
        await asyncio.wait([watching, asyncio.create_task(counted.wait())], return_when=asyncio.FIRST_COMPLETED)
        watching.cancel()
        return platform.report()["replicas"]

    monkeypatch.setattr(serve_platform, "SAMPLE_S", 0.0)
    assert asyncio.run(whole()) == 2


def test_from_zero_to_several_replicas_and_back(platform, post, tmp_path):
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


def test_a_busy_replica_that_is_not_needed_any_more_finishes_its_call(platform, post, tmp_path):
    """Serve stops the newest replica, though it is the one that works."""
    with ThreadPoolExecutor(2) as pool:
        try:
            older = pool.submit(post, 1)
            wait_for(lambda: len(calls(tmp_path)) == 1)
            newer = pool.submit(post, 2)
            wait_for(lambda: len(calls(tmp_path)) == 2)
            addresses = {address for pid, _ in calls(tmp_path) for address in listens_on(pid)}
            (tmp_path / "gate 1").touch()
            assert older.result()["answers"][0]["values"] == [1.0]
            # Both replicas are counted until one is gone.
            enough = platform.health()["replica_s"] + 2 * 8.0
            wait_for(lambda: newer.done() or platform.health()["replica_s"] > enough)
        finally:
            (tmp_path / "gate").touch()
        assert newer.result()["answers"][0].get("values") == [2.0]
    assert [trajectory for _, trajectory in calls(tmp_path)] == [1, 2]
    assert addresses
    assert all(address.endswith(LOOPBACK) for address in addresses), addresses
    platform.wait_until_idle()
