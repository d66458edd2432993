"""Test worker for runtimes: answers questions, immediately or later, and raises on request.

It uses the reward role's messages. Settings: `slots` (returned by `info`), `fail` (`construction`, `info` or `close`),
and `mark`, a file to which `close` appends a line, visible to other processes. The part of a question's key before the
first `/` selects what happens:

    echo       answered with the size of the batch it arrived in
    later      answered after the seconds in `transcript`, through `wake_at`
    python     answered with the CRC-32 of the path of its interpreter
    wake       answered after a thread has called `wake`
    post       raises in `post`
    advance    raises in `advance`
"""

import sys
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollart.ports.worker import Advance
from rollart.types.ids import TrajectoryId
from rollart.types.messages import EpisodeRecord, RewardInfo, Scored, ScoreRequest, WorkerCommand, WorkerEvent

FACTORY = "rollart.conformance.echo:EchoWorker"
TASK = "echo"


class Asked(RuntimeError):
    """The worker was asked to raise."""


class EchoWorker:
    """A worker for tests of runtimes."""

    def __init__(self, settings: Mapping[str, Any], wake: Callable[[], None]) -> None:
        self._settings = dict(settings)
        self._wake = wake
        self._events: list[WorkerEvent] = []
        self._new: list[tuple[str, float]] = []
        self._later: list[tuple[float, str]] = []
        self._woken: list[str] = []
        self._fail("construction")

    def info(self) -> RewardInfo:
        self._fail("info")
        return RewardInfo(slots=int(self._settings.get("slots", 1)))

    def post(self, commands: Sequence[WorkerCommand]) -> None:
        for command in commands:
            if not isinstance(command, ScoreRequest):
                raise TypeError(f"an echo worker accepts ScoreRequest, not {type(command).__name__}")
            verb = command.key.partition("/")[0]
            if verb == "post":
                raise Asked("raised in post")
            if verb == "wake":
                threading.Thread(target=self._wake_later, args=(command.key,), daemon=True).start()
            elif verb == "python":
                self._new.append((command.key, float(interpreter_checksum(sys.executable))))
            else:
                self._new.append((command.key, float(command.episodes[0].transcript or len(commands))))

    def advance(self, now: float) -> Advance:
        new, self._new = self._new, []
        for key, number in new:
            verb = key.partition("/")[0]
            if verb == "advance":
                raise Asked("raised in advance")
            if verb == "later":
                self._later.append((now + number, key))
            else:
                self._events.append(Scored(key, (number,)))
        while self._woken:
            self._events.append(Scored(self._woken.pop(0), (now,)))
        self._events += [Scored(key, (now,)) for due, key in sorted(self._later) if due <= now]
        self._later = [(due, key) for due, key in self._later if due > now]
        events, self._events = self._events, []
        return Advance(events, min(self._later)[0] if self._later else None)

    def close(self) -> None:
        mark = self._settings.get("mark")
        if mark is not None:
            with Path(mark).open("a") as file:
                file.write("closed\n")
        self._fail("close")

    def _fail(self, where: str) -> None:
        if self._settings.get("fail") == where:
            raise Asked(f"raised in {where}")

    def _wake_later(self, key: str) -> None:
        self._woken.append(key)
        self._wake()


def interpreter_checksum(python: str) -> int:
    """A path as a number, which is all that an answer holds."""
    return zlib.crc32(python.encode())


def question(key: str, *, seconds: float | None = None) -> ScoreRequest:
    """A question for the echo worker."""
    transcript = b"" if seconds is None else str(seconds).encode()
    return ScoreRequest(key, TASK, "echo", (EpisodeRecord(TrajectoryId(0), 0, transcript=transcript),))
