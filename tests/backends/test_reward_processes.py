"""Faults of real processes: functions that hang, crash or hold the interpreter lock, and services that go away."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from obedient import OBEY, question
from parts import PATIENCE_S, RewardDriver

from rollart.backends.rewards.child_replica import ChildReplica, ChildReplicas
from rollart.backends.rewards.remote_host import RemoteHost
from rollart.backends.rewards.replica_host import ReplicaHost
from rollart.ports.replicas import ReplicaLost, ReplicaOrder
from rollart.types.messages import Scored, ScoreFailed

TESTS = Path(__file__).parents[1]


@pytest.fixture
def pool():
    driver = RewardDriver(ReplicaHost, {"function": OBEY, "slots": 1})
    yield driver
    driver.worker.close()


def ask(driver, *questions):
    driver.send(*questions)
    return {answer.key: answer for answer in driver.answers(len(questions))}


def gone(pid):
    """Whether the process has ended; waited for."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("how", ["hang", "hold the lock"])
def test_a_function_that_never_returns_is_killed_at_its_limit_and_the_pool_is_whole_again(pool, how):
    (first,) = ask(pool, question(1, "pid")).values()
    (failed,) = ask(pool, question(2, how, deadline_s=0.5)).values()
    assert failed == ScoreFailed("2", "the function took longer than 0.5 s and its replica was killed", retry=True)
    assert gone(int(first.values[0]))
    (second,) = ask(pool, question(3, "pid")).values()
    assert second.values != first.values
    use = pool.uses["t/obey"]
    assert (use.calls, use.failed, use.kills, use.cold_starts) == (3, 1, 1, 2)


def test_what_a_function_started_is_killed_with_it(pool, tmp_path):
    ask(pool, question(1, "pid"))
    note = tmp_path / "child"
    pool.send(question(2, f"leave {note}", deadline_s=3.0))
    (failed,) = pool.answers()
    assert isinstance(failed, ScoreFailed)
    if note.exists():  # on a very busy machine it may not have come that far
        assert gone(int(note.read_text()))


@pytest.mark.parametrize(("how", "why"), [("crash", "was killed by SIGSEGV"), ("exit", "exited with 3")])
def test_a_function_that_ends_its_process_costs_its_own_call_only(pool, how, why):
    (failed,) = ask(pool, question(1, how)).values()
    assert failed == ScoreFailed("1", f"the process of the reward function {why}", retry=True)
    assert isinstance(ask(pool, question(2, "pid"))["2"], Scored)


def test_a_stopped_process_is_killed_though_it_reads_nothing(pool):
    """The request is larger than the buffer of the socket."""
    (first,) = ask(pool, question(1, "pid")).values()
    os.kill(int(first.values[0]), signal.SIGSTOP)
    noise = os.urandom(2**19).hex()
    (failed,) = ask(pool, question(2, noise, deadline_s=0.5)).values()
    assert failed.retry
    assert "killed" in failed.reason
    assert isinstance(ask(pool, question(3, "pid"))["3"], Scored)


def test_a_replica_that_was_ready_too_late_is_kept(pool):
    (failed,) = ask(pool, question(1, "pid", deadline_s=1e-6)).values()
    assert failed == ScoreFailed("1", "no replica was ready before its deadline; raise deadline_s", retry=True)
    assert isinstance(ask(pool, question(2, "pid"))["2"], Scored)
    use = pool.uses["t/obey"]
    assert (use.calls, use.kills, use.cold_starts) == (2, 0, 1)


@pytest.mark.parametrize("error", [OSError("too many open files"), TypeError("a bug")])
def test_a_start_that_fails_in_any_way_costs_its_own_call_only(error):
    class Starter:
        def __init__(self):
            self.errors = [error]

        def start(self, order):
            if self.errors:
                raise self.errors.pop()
            return ChildReplicas().start(order)

    driver = RewardDriver(ReplicaHost, {"function": OBEY, "slots": 1, "starter": Starter()})
    assert ask(driver, question(1, "pid")) == {
        "1": ScoreFailed("1", f"its replica failed: {type(error).__name__}: {error}", retry=True)
    }
    assert isinstance(ask(driver, question(1, "pid"))["1"], Scored)
    driver.worker.close()


def test_folders_of_imports_may_be_path_objects(pool, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])
    assert isinstance(ask(pool, question(1, "pid"))["1"], Scored)


def test_a_body_that_raises_ends_its_process_whatever_threads_it_has():
    replica = ChildReplica(ReplicaOrder("obedient:raising_body", OBEY, 0))
    replica.wait_until_ready(PATIENCE_S)
    with pytest.raises(ReplicaLost, match="exited with 1"):
        replica.call(b"", PATIENCE_S)
    replica.kill()


def test_a_function_that_cannot_be_imported_says_so():
    driver = RewardDriver(ReplicaHost, {"function": "obedient:missing", "slots": 1})
    (failed,) = ask(driver, question(1, "pid")).values()
    assert "has no 'missing'" in failed.reason
    driver.worker.close()


OWNER = """
import sys, threading
sys.path[:] = {path!r}
from obedient import question
from rollart.backends.rewards.replica_host import ReplicaHost
host = ReplicaHost({{"function": "obedient:obey", "slots": 1}}, threading.Event().set)
answered = threading.Event()
host._wake = answered.set
host.post([question(1, "pid")])
host.advance(0.0)
answered.wait()
print(int(host.advance(0.0).events[-1].values[0]), flush=True)
host.post([question(2, "hold the lock")])
host.advance(0.0)
threading.Event().wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends a process with its parent on Linux only")
def test_no_process_outlives_its_worker_not_even_one_that_holds_the_lock():
    code = OWNER.format(path=sys.path)
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    child = int(owner.stdout.readline())
    owner.kill()
    owner.wait()
    assert gone(child)
    owner.stdout.close()


@contextmanager
def service(port):
    """A server in a process of its own, killed at the end; it is ready when it listens."""
    command = [sys.executable, str(TESTS / "reward_server.py"), OBEY, str(port)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    )
    try:
        assert process.stdout.readline()
        yield
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_service_that_scales_to_zero_under_load_costs_no_call():
    """Its only process is killed with calls in flight, and another starts later at the same address."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    driver = RewardDriver(RemoteHost, {"url": f"http://127.0.0.1:{port}/score", "slots": 8})
    expected = {str(number): Scored(str(number), (float(number % 5 + 1),)) for number in range(60)}
    questions = [question(number, f"length {'x' * (number % 5 + 1)}") for number in range(60)]
    answers = {}
    with service(port):
        driver.send(*questions[:30])
        answers |= {answer.key: answer for answer in driver.answers(5)}
    driver.send(*questions[30:])
    driver.slice()
    with service(port):
        while len(answers) < 60:
            for answer in driver.answers():
                assert answer.key not in answers or answers[answer.key] == answer
                if isinstance(answer, Scored):
                    answers[answer.key] = answer
                else:  # as the controller does
                    assert answer.retry
                    driver.send(questions[int(answer.key)])
    assert answers == expected
    driver.worker.close()
