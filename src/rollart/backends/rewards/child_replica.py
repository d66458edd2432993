"""Replicas as child processes of the reward worker, each with a socket to it.

A child leads a process group of its own, so that what the function starts is killed with it. It ends when its worker
does, even where the function holds the interpreter lock: the kernel kills it with its parent (on Linux), and everywhere
it ends once its socket is closed.
"""

import json
import math
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing.connection import Connection

from rollart.ports.factory import moves
from rollart.ports.replicas import ReplicaLate, ReplicaLost, ReplicaOrder

START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); import {module} as m; m.main(*sys.argv[2:])"
MODULE = "rollart.backends.rewards.replica_process"
EXIT_S = 5.0
READY = b"ready"


class ChildReplicas:
    """Starts replicas as child processes (`ports.replicas.ReplicaStarter`)."""

    def start(self, order: ReplicaOrder) -> "ChildReplica":
        return ChildReplica(order)


class ChildReplica:
    """One child process (`ports.replicas.Replica`)."""

    def __init__(self, order: ReplicaOrder) -> None:
        path = json.dumps(list(map(str, sys.path)))
        moved = json.dumps([[str(before), str(after)] for before, after in moves()])
        try:
            ours, theirs = socket.socketpair()
            command = [sys.executable, "-c", START.format(module=MODULE), path, str(theirs.fileno())]
            with theirs:
                self._process = subprocess.Popen(
                    [*command, str(os.getpid()), order.body, order.function, moved],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
        except OSError as error:
            raise ReplicaLost(f"no process could be started: {error}") from error
        self._socket = ours
        self._connection = Connection(os.dup(ours.fileno()))

    def wait_until_ready(self, limit_s: float) -> None:
        try:
            started = self._received(time.monotonic() + limit_s)
        except ReplicaLate:
            raise ReplicaLost(f"the import of the reward function took longer than {limit_s:g} s") from None
        except (EOFError, OSError) as error:
            raise ReplicaLost(self._why(error)) from error
        if started != READY:
            raise ReplicaLost(started.decode(errors="replace"))

    def call(self, request: bytes, limit_s: float) -> bytes:
        until = time.monotonic() + limit_s
        try:
            # A process that is stopped reads nothing, and a large request does not fit into the buffer of the socket.
            timeout = struct.pack("ll", *_timeval(until - time.monotonic()))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
            self._connection.send_bytes(request)
            return self._received(until)
        except BlockingIOError:
            raise ReplicaLate from None
        except (EOFError, OSError) as error:
            raise ReplicaLost(self._why(error)) from error

    def kill(self) -> None:
        with suppress(ProcessLookupError, PermissionError):  # already gone
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if not self._connection.closed:
            self._connection.close()
            self._socket.close()

    def _received(self, until: float) -> bytes:
        left_s = until - time.monotonic()
        if not self._connection.poll(None if left_s == math.inf else max(0.0, left_s)):
            raise ReplicaLate
        return self._connection.recv_bytes()

    def _why(self, error: Exception) -> str:
        try:
            code = self._process.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            return f"the connection to the process of the reward function broke: {error}"
        died = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        return f"the process of the reward function {died}"


def _timeval(seconds: float) -> tuple[int, int]:
    """`seconds` as a `timeval`; 0 means no limit."""
    if seconds == math.inf:
        return 0, 0
    micros = max(1, round(seconds * 1e6))
    return micros // 10**6, micros % 10**6
