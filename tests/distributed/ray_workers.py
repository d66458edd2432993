"""Workers that misbehave in a process of their own, and what tests need to look at them."""

import ctypes
import os
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from rollart.ports.worker import Advance
from rollart.types.ids import TrajectoryId
from rollart.types.messages import EpisodeRecord, Observed, RewardInfo, ScoreRequest
from rollart.types.tokens import EMPTY


class Odd:
    """Answers every `ScoreRequest` with an `Observed` of the same number; its key selects the behaviour.

    echo    nothing: the transcript comes back
    facts   the transcript is what it knows of its process
    child   starts a process that would stay for ever; the transcript is its pid
    fork    leaves a copy of its process behind, with all that is open; the transcript is both pids
    cut     closes its connections and lives on
    crash   reads from address 0
    freeze  makes the file that the transcript names, then hangs in native code without letting go of the interpreter
    wrong   gives an event that is no message
    untrue  gives an event whose fields are not what they should be
    """

    def __init__(self, settings, wake):  # noqa: ARG002 - it never wakes the runtime
        if "fail" in settings:
            raise ValueError(settings["fail"])
        self.commands = []

    def info(self):
        return RewardInfo(slots=1)

    def post(self, commands):
        for command in commands:
            if command.key == "freeze":
                Path(command.episodes[0].transcript.decode()).touch()
                ctypes.PyDLL(None).sleep(600)
        self.commands += commands

    def advance(self, now):  # noqa: ARG002 - nothing is timed
        commands, self.commands = self.commands, []
        return Advance([self.answer(command) for command in commands], None)

    def answer(self, command):
        episode = command.episodes[0]
        data = episode.transcript
        match command.key:
            case "facts":
                cores = sorted(os.sched_getaffinity(0))
                token, threads = os.environ.get("RAY_AUTH_TOKEN"), os.environ["OMP_NUM_THREADS"]
                data = repr((os.getpid(), cores, token, threads, os.getcwd())).encode()
            case "child":
                data = str(subprocess.Popen(["sleep", "600"]).pid).encode()
            case "fork":
                child = os.fork()
                if not child:
                    time.sleep(600)
                data = repr((os.getpid(), child)).encode()
            case "cut":
                for number in range(3, 1000):
                    with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
                        connection.shutdown(socket.SHUT_RDWR)
            case "crash":
                ctypes.string_at(0)
            case "raise":
                raise LookupError("no such thing")
            case "wrong":
                return object()
            case "untrue":
                return Observed("first", 0, EMPTY)
        return Observed(episode.trajectory, 0, EMPTY, transcript=data)

    def close(self):
        pass


def score(key, number=0, data=b""):
    return ScoreRequest(key, "t", "echo", (EpisodeRecord(TrajectoryId(number), 0, transcript=data),))


def runs(pid):
    """Whether the process is there and not merely unburied."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
