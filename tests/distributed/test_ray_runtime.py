"""The Ray runtime beyond its port: real processes that are killed, hang and crash, and what is left of them."""

import ast
import asyncio
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from ray_workers import runs, score, wait_until

from rollart.backends.stores.memory import MemoryStore
from rollart.types.errors import InvariantBroken, RequestError
from rollart.types.messages import RewardInfo, Role

pytest.importorskip("ray", reason="Ray is not installed: pip install 'rollart[ray]'")

from rollart.distributed import link, ray_runtime
from rollart.distributed.handshake import Credentials
from rollart.distributed.ray_runtime import RayRuntime

ODD = "ray_workers:Odd"


class RecordingListener:
    def __init__(self):
        self.joins, self.got, self.deaths, self.batches = [], {}, {}, 0
        self.news = asyncio.Event()
        self.fails_for = None
        self.failures = []

    def joined(self, worker, info):
        assert info == RewardInfo(slots=1)
        self.joins.append(worker)
        self.news.set()
        if worker == self.fails_for:
            raise RuntimeError("the listener is broken")

    def events(self, worker, events):
        self.got.setdefault(worker, []).extend(events)
        self.batches += 1
        self.news.set()

    def died(self, worker, reason):
        assert worker not in self.deaths
        self.deaths[worker] = reason
        self.news.set()

    def failed(self, error):
        self.failures.append(error)
        self.news.set()

    async def until(self, condition):
        async with asyncio.timeout(100):
            while not condition():
                self.news.clear()
                await self.news.wait()

    async def answer(self, worker):
        """The transcript of the worker's first answer."""
        await self.until(lambda: self.got.get(worker))
        return self.got[worker][0].transcript


@pytest.fixture
def with_runtime(local_ray, tmp_path):  # noqa: ARG001 - it has to be there
    def run(test, **options):
        async def main():
            runtime, listener = RayRuntime(tmp_path / "logs", **options), RecordingListener()
            runtime.listen(listener)
            try:
                await test(runtime, listener)
            finally:
                await runtime.close()

        asyncio.run(main())

    return run


async def until(condition):
    """Poll a condition that sends no notification, with the loop running."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def spawn(runtime, worker, **settings):
    runtime.spawn(worker, Role.REWARD, ODD, settings)


def test_a_killed_process_is_a_death_and_takes_no_other_with_it(with_runtime, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ray_runtime, "FINAL_REPORT_S", 60.0)  # on a busy machine Ray is slow to report

    async def test(runtime, listener):
        for worker in ("killed", "crashed", "good"):
            spawn(runtime, worker)
        runtime.post("killed", [score("facts")])
        pid, cores, token, threads, folder = ast.literal_eval((await listener.answer("killed")).decode())
        assert cores == [0]
        assert token is None
        assert threads == "1"
        assert folder == str(tmp_path)
        await listener.until(lambda: len(listener.joins) == 3)
        os.kill(pid, signal.SIGKILL)
        await listener.until(lambda: "killed" in listener.deaths)
        assert "its process ended without an error: killed" in listener.deaths["killed"]
        runtime.post("crashed", [score("crash")])
        await listener.until(lambda: "crashed" in listener.deaths)
        assert "crashed.log: Fatal Python error: Segmentation fault" in listener.deaths["crashed"]
        runtime.post("good", [score("echo", data=b"well")])
        assert await listener.answer("good") == b"well"
        assert "good" not in listener.deaths

    with_runtime(test, cores={Role.REWARD: (0,)})
    assert capfd.readouterr().out == ""


def test_a_killed_process_is_a_death_though_a_copy_of_it_lives_on(with_runtime, monkeypatch):
    monkeypatch.setattr(ray_runtime, "FINAL_REPORT_S", 0.1)

    async def test(runtime, listener):
        spawn(runtime, "forked")
        runtime.post("forked", [score("fork")])
        pid, child = ast.literal_eval((await listener.answer("forked")).decode())
        os.kill(pid, signal.SIGKILL)
        try:
            # Its copy has everything open that Ray has, which then takes its time to notice.
            await listener.until(lambda: "forked" in listener.deaths)
            assert "its connection broke" in listener.deaths["forked"]
        finally:
            os.kill(child, signal.SIGKILL)

    with_runtime(test)


def test_a_process_that_is_frozen_is_a_death_and_is_killed(with_runtime, monkeypatch):
    monkeypatch.setattr(link, "FROZEN_S", 2 * link.PULSE_S)

    async def test(runtime, listener):
        for worker in ("frozen", "good"):
            spawn(runtime, worker)
        runtime.post("frozen", [score("facts")])
        pid = ast.literal_eval((await listener.answer("frozen")).decode())[0]
        await listener.until(lambda: len(listener.joins) == 2)
        os.kill(pid, signal.SIGSTOP)
        await listener.until(lambda: "frozen" in listener.deaths)
        assert "its process is frozen" in listener.deaths["frozen"]
        await asyncio.to_thread(wait_until, lambda: not runs(pid))
        runtime.post("good", [score("echo", data=b"well")])
        assert await listener.answer("good") == b"well"
        assert "good" not in listener.deaths

    with_runtime(test)


def test_a_process_is_titled_by_its_worker(with_runtime):
    async def test(runtime, listener):
        for worker in ("reward/sum/0.0", "reward/sum/0.1"):
            spawn(runtime, worker)
            runtime.post(worker, [score("facts")])
            process = Path("/proc", str(ast.literal_eval((await listener.answer(worker)).decode())[0]))
            place = worker.removeprefix("reward/")
            # The call that sets it is made when the worker is spawned, and may be carried out after its first answer.
            wait_until(lambda process=process: safe_text(process / "cmdline").startswith("rollart: "))
            assert safe_text(process / "cmdline").rstrip("\0") == f"rollart: reward {place}"
            wait_until(lambda process=process, place=place: safe_text(process / "comm") == f"reward {place}\n")

    with_runtime(test)


def test_a_connection_that_breaks_is_a_death(with_runtime):
    async def test(runtime, listener):
        spawn(runtime, "cut")
        runtime.post("cut", [score("facts")])
        pid = ast.literal_eval((await listener.answer("cut")).decode())[0]
        runtime.post("cut", [score("cut")])
        await listener.until(lambda: "cut" in listener.deaths)
        wait_until(lambda: not runs(pid))

    with_runtime(test)


def test_an_error_is_told_in_a_line_and_logged_in_full(with_runtime, tmp_path):
    async def test(runtime, listener):
        spawn(runtime, "reward/a/0.0", fail="in the factory")
        spawn(runtime, "reward/b/0.0")
        spawn(runtime, "reward/c/0.0")
        spawn(runtime, "reward/d/0.0")
        spawn(runtime, "reward/e/0.0")
        runtime.post("reward/b/0.0", [score("echo"), score("raise")])
        runtime.post("reward/c/0.0", [score("wrong")])
        runtime.post("reward/d/0.0", [score("untrue")])
        runtime.post("reward/e/0.0", [score("echo", number="first")])
        await listener.until(lambda: len(listener.deaths) == 5)
        assert listener.deaths["reward/a/0.0"] == "ValueError: in the factory"
        assert listener.deaths["reward/b/0.0"] == "LookupError: no such thing"
        assert listener.deaths["reward/c/0.0"] == "TypeError: object is not a message; workers exchange types.messages"
        assert "invalid event" in listener.deaths["reward/d/0.0"]
        assert "`$.episode`" in listener.deaths["reward/d/0.0"]
        assert "a command could not be decoded" in listener.deaths["reward/e/0.0"]

    with_runtime(test)
    for worker, line in (("a", "ValueError: in the factory"), ("b", "LookupError: no such thing")):
        log = (tmp_path / "logs" / "reward" / worker / "0.0.log").read_text()
        assert "Traceback" in log
        assert line in log


def test_a_worker_that_hangs_is_killed_when_it_is_stopped(with_runtime, caplog, tmp_path):
    frozen = tmp_path / "frozen"

    async def test(runtime, listener):
        spawn(runtime, "stuck")
        runtime.post("stuck", [score("facts")])
        pid = ast.literal_eval((await listener.answer("stuck")).decode())[0]
        runtime.post("stuck", [score("freeze", data=bytes(frozen))])
        await until(frozen.exists)
        runtime.stop("stuck")
        await runtime.close()
        wait_until(lambda: not runs(pid))
        assert not listener.deaths

    with_runtime(test, close_timeout_s=0.3)
    assert "stuck did not close within 0.3 s" in caplog.text


def test_large_and_small_messages_keep_their_order(with_runtime):
    async def test(runtime, listener):
        workers = [f"w{number}" for number in range(4)]
        for worker in workers:
            spawn(runtime, worker)
        large = os.urandom(20_000_000)
        for number in range(64):
            for worker in workers:
                data = large if (worker, number) == ("w0", 5) else b"x" * 300_000 if number == 7 else b""
                runtime.post(worker, [score("echo", number, data)])
            if number % 3 == 0:
                await asyncio.sleep(0)
        for worker in workers:
            await listener.until(lambda worker=worker: len(listener.got.get(worker, ())) == 64)
            assert [event.episode for event in listener.got[worker]] == list(range(64))
        assert listener.got["w0"][5].transcript == large
        assert listener.batches < 4 * 64  # what waits travels together

    with_runtime(test)


def test_a_broken_listener_loses_nothing_but_its_own(with_runtime):
    async def test(runtime, listener):
        problems = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
        listener.fails_for = "w"
        spawn(runtime, "w")
        runtime.post("w", [score("echo")])
        await listener.until(lambda: listener.got)
        assert "broken" in str(problems[0]["exception"])

    with_runtime(test)


@pytest.mark.usefixtures("local_ray")
def test_what_cannot_travel_or_be_is_refused(tmp_path):
    async def main():
        runtime = RayRuntime(tmp_path)
        with pytest.raises(InvariantBroken, match="listen"):
            spawn(runtime, "w")
        runtime.listen(RecordingListener())
        with pytest.raises(InvariantBroken, match="once"):
            runtime.listen(RecordingListener())
        with pytest.raises(RequestError, match=r"'store' of worker w is a MemoryStore.*lives in one process"):
            spawn(runtime, "w", size=3, store=MemoryStore())
        runtime.stop("never there")
        runtime.post("never there", [score("echo")])
        await runtime.close()
        with pytest.raises(RequestError, match="closed"):
            spawn(runtime, "w")

    asyncio.run(main())


# --- the Ray below --------------------------------------------------------------------------------------------------


def test_nothing_listens_beyond_this_machine(with_runtime):
    """Every listening socket of this process and of all that it started is on the loopback address."""

    async def test(runtime, listener):
        spawn(runtime, "w")
        await listener.until(lambda: listener.joins)
        found = listening()
        assert len(found) >= 4  # at least Ray's own server, its node, this process and the worker
        assert {address[-8:] for address in found} == {"0100007F"}  # 127.0.0.1, as such or within IPv6

    with_runtime(test)


def listening():
    """The addresses, in hexadecimal, on which this process and its descendants listen."""
    sockets = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                sockets[f"socket:[{fields[9]}]"] = fields[1].partition(":")[0]
    return [sockets[link] for process in family() for link in links(process) if link in sockets]


def family():
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        if text := safe_text(path):
            parents[int(path.parent.name)] = int(text.rpartition(")")[2].split()[1])
    found = [os.getpid()]
    for process in found:
        found += [child for child, parent in parents.items() if parent == process]
    return found


def links(process):
    with suppress(OSError):  # the process is gone meanwhile
        for file in Path(f"/proc/{process}/fd").iterdir():
            with suppress(OSError):
                yield os.readlink(file)


@pytest.mark.usefixtures("local_ray")
def test_who_has_no_token_is_refused():
    import ray

    address = ray.get_runtime_context().gcs_address
    code = f"""
import os
os.environ["RAY_AUTH_MODE"] = "disabled"
from ray._raylet import GcsClient
GcsClient(address={address!r})
"""
    done = controller(code)
    assert done.returncode != 0
    assert "InvalidAuthToken" in done.stderr


@pytest.mark.usefixtures("local_ray")
def test_two_at_once_are_refused():
    from rollart.distributed.ray_local import LocalRay

    with pytest.raises(RequestError, match="already connected"), LocalRay():
        pass


def test_a_process_can_use_one_ray_after_another():
    code = """
import os
import ray
from rollart.distributed.ray_local import LocalRay
token = ray.remote(lambda: os.environ["RAY_AUTH_TOKEN"])
seen = []
for _ in range(2):
    with LocalRay():
        seen.append(ray.get(token.remote()))
print(len(set(seen)))
"""
    done = controller(code)
    assert done.stdout == "2\n", done.stderr


def test_workers_never_join_a_ray_that_they_find(tmp_path):
    code = """
import asyncio
from pathlib import Path
from rollart.distributed.ray_runtime import RayRuntime
from test_ray_runtime import RecordingListener, spawn

async def main():
    runtime = RayRuntime(Path())
    runtime.listen(RecordingListener())
    spawn(runtime, "w")

asyncio.run(main())
"""
    done = controller(code, cwd=tmp_path)
    assert "open a LocalRay first" in done.stderr


def controller(code, *words, **options):
    """Run code in a process of its own, which finds what this one finds."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False, **options)


CONTROLLER = """
import asyncio, os, signal, sys
from pathlib import Path
from rollart.distributed.ray_local import LocalRay
from rollart.distributed.ray_runtime import RayRuntime
from test_ray_runtime import RecordingListener, spawn, until
from ray_workers import score

async def main():
    frozen = Path(sys.argv[1], "frozen")
    runtime, listener = RayRuntime(Path(sys.argv[1]), close_timeout_s=0.5), RecordingListener()
    runtime.listen(listener)
    spawn(runtime, "w")
    spawn(runtime, "stuck")
    runtime.post("w", [score("child")])
    await listener.until(lambda: len(listener.joins) == 2)
    print((await listener.answer("w")).decode(), flush=True)
    runtime.post("stuck", [score("freeze", data=bytes(frozen))])
    await until(frozen.exists)
    if sys.argv[2] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    await runtime.close()

with LocalRay() as local:
    print(local.folder, flush=True)
    asyncio.run(main())
"""


@pytest.mark.parametrize("how", ["killed", "closed"])
def test_nothing_is_left_of_it(how, tmp_path):
    """Neither Ray's processes, nor workers (one hangs in native code), nor what these started, nor its folder."""
    done = controller(CONTROLLER, tmp_path, how)
    assert done.returncode == (-signal.SIGKILL if how == "killed" else 0), done.stderr
    folder, child = done.stdout.split()
    wait_until(lambda: not Path(folder).exists())
    wait_until(lambda: not runs(int(child)))
    wait_until(lambda: not [path for path in Path("/proc").glob("[0-9]*/cmdline") if folder in safe_text(path)])


def safe_text(path):
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def test_a_worker_with_wrong_credentials_dies_with_a_reason(with_runtime, monkeypatch):
    monkeypatch.setattr(ray_runtime, "FINAL_REPORT_S", 60.0)  # on a busy machine Ray is slow to report
    order = ray_runtime.Order
    monkeypatch.setattr(ray_runtime, "Order", lambda *fields: order(*fields[:-1], Credentials.new()))

    async def test(runtime, listener):
        spawn(runtime, "stranger")
        await listener.until(lambda: "stranger" in listener.deaths)
        assert "no link to the controller at 127.0.0.1:" in listener.deaths["stranger"]
        assert "it could not prove that it is the controller of this worker" in listener.deaths["stranger"]
        assert listener.joins == []

    with_runtime(test)


def test_a_command_that_no_link_takes_is_the_death_of_its_worker_only(with_runtime, monkeypatch):
    async def test(runtime, listener):
        for worker in ("a", "b"):
            spawn(runtime, worker)
        await listener.until(lambda: len(listener.joins) == 2)
        monkeypatch.setattr(link, "MAX_FRAME_BYTES", 1000)
        runtime.post("a", [score("echo", data=bytes(1000))])
        await listener.until(lambda: "a" in listener.deaths)
        assert "bytes is larger than the limit of a link, 1,000" in listener.deaths["a"]
        runtime.post("b", [score("echo", data=b"well")])
        assert await listener.answer("b") == b"well"

    with_runtime(test)


def test_a_worker_whose_link_breaks_ends_by_itself(with_runtime):
    async def test(runtime, listener):
        spawn(runtime, "cut")
        await listener.until(lambda: "cut" in listener.joins)
        host = runtime._hosts["cut"]
        host.watching.cancel()  # the controller does not notice
        host.peer.close()
        async with asyncio.timeout(60):
            await host.actor.wait.remote()

    with_runtime(test)
