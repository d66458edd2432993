"""The drive of the worker suites: time, waiting, and that a broken worker is an error and never a hang."""

import threading
from collections.abc import Callable, Sequence

import pytest

from rollart.conformance import drive as drive_module
from rollart.conformance.case import ConformanceError
from rollart.conformance.drive import Slice, WorkerDrive
from rollart.conformance.echo import EchoWorker, question
from rollart.conformance.engine_turns import longest_silence_s
from rollart.ports.worker import Advance, Worker
from rollart.types.messages import RewardInfo, Scored, WorkerCommand


def echo(wake: Callable[[], None]) -> Worker:
    return EchoWorker({}, wake)


class Restless:
    """Asks to be called at once, forever, and emits no event."""

    def info(self) -> RewardInfo:
        return RewardInfo(slots=1)

    def post(self, commands: Sequence[WorkerCommand]) -> None:
        pass

    def advance(self, now: float) -> Advance:
        return Advance([], now)

    def close(self) -> None:
        pass


class Blocking(Restless):
    """Never comes back from `advance`."""

    def advance(self, now: float) -> Advance:
        threading.Event().wait()
        return super().advance(now)


def test_virtual_time_jumps() -> None:
    with WorkerDrive(echo, virtual=True) as drive:
        drive.send(question("later/1", seconds=1000.0), question("echo/1"))
        event = drive.until(lambda event: isinstance(event, Scored) and event.key == "later/1")
        assert isinstance(event, Scored)
        assert drive.now() == event.values[0] == 1000.0
        assert drive.slices == [(0.0, 1), (1000.0, 1)]


def test_virtual_time_passes_without_work() -> None:
    with WorkerDrive(echo, virtual=True) as drive:
        drive.run_for(3.0)
        assert drive.now() == 3.0
        drive.send(question("later/1", seconds=10.0))
        drive.run_for(4.0)
        assert (drive.now(), drive.events) == (7.0, [])


@pytest.mark.parametrize("key", ["later/1", "wake/1"])
def test_real_time_waits_for_clock_and_threads(key: str) -> None:
    with WorkerDrive(echo, virtual=False) as drive:
        drive.send(question(key, seconds=0.02))
        assert drive.until(Scored).key == key


def test_silence_is_counted_only_while_a_worker_is_called() -> None:
    late = [Slice(1.0, 0), Slice(1.1, 0), Slice(3.0, 1), Slice(3.2, 0)]
    assert longest_silence_s(late, virtual=False) == pytest.approx(0.2)  # called late, it reported at once
    assert longest_silence_s(late, virtual=True) == pytest.approx(2.0)
    mute = [Slice(1.0, 1), Slice(1.5, 0), Slice(3.0, 0), Slice(3.1, 1)]
    assert longest_silence_s(mute, virtual=False) == pytest.approx(2.0)


def test_until_looks_after_a_place() -> None:
    with WorkerDrive(echo, virtual=True) as drive:
        drive.send(question("echo/1"))
        drive.settle()
        place = drive.mark()
        drive.send(question("echo/2"))
        assert drive.until(Scored).key == "echo/1"
        assert drive.until(Scored, after=place).key == "echo/2"


@pytest.mark.parametrize("virtual", [True, False])
def test_a_worker_that_never_answers(virtual: bool) -> None:
    with WorkerDrive(echo, virtual=virtual) as drive, pytest.raises(ConformanceError, match="did not come within"):
        drive.until(Scored, within_s=0.02)


def test_a_worker_that_never_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drive_module, "MAX_SLICES", 100)
    with WorkerDrive(lambda _wake: Restless(), virtual=True) as drive:
        drive.send(question("echo/1"))
        with pytest.raises(ConformanceError, match="did not come"):
            drive.until(Scored)
        with pytest.raises(ConformanceError, match="never becomes idle"):
            drive.settle()
        with pytest.raises(ConformanceError, match="took 100 slices"):
            drive.run_for(1.0)


def test_a_worker_that_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    with WorkerDrive(lambda _wake: Blocking(), virtual=True) as drive:
        drive.send(question("echo/1"))
        monkeypatch.setattr(drive_module, "CALL_PATIENCE_S", 0.05)
        with pytest.raises(ConformanceError, match=r"no call of a worker blocks, but advance\(\)"):
            drive.until(Scored)


def test_a_worker_that_is_built_too_late_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    go, closed = threading.Event(), threading.Event()

    class Late(Restless):
        def close(self) -> None:
            closed.set()

    def factory(_wake: Callable[[], None]) -> Worker:
        go.wait()
        return Late()

    monkeypatch.setattr(drive_module, "CALL_PATIENCE_S", 0.05)
    with pytest.raises(ConformanceError, match="the factory took over"):
        WorkerDrive(factory, virtual=True)
    go.set()
    assert closed.wait(100)


def test_a_worker_that_raises() -> None:
    with WorkerDrive(echo, virtual=True) as drive, pytest.raises(ConformanceError, match="raised in post") as caught:
        drive.send(question("post/1"))
    assert caught.value.__cause__ is not None
