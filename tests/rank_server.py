"""Ranks by fork: a process that has imported everything makes each in a moment, where a fresh one takes seconds.

It never computes, so its forks are as good as fresh processes; what they run is `rank_process.serve` all the same.
"""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path


class RankServer:
    """`start` stands in for `ranks.start_process`."""

    def __init__(self):
        self._socket, theirs = socket.socketpair()
        self._lock = threading.Lock()
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )

    def start(self, end, log, rank):  # noqa: ARG002 - the title of a process; a fork has none
        with self._lock:
            socket.send_fds(self._socket, [b"start"], [end.fileno(), log.fileno()])
            return Forked(int(self._socket.recv(64)), self)

    def ended(self, pid):
        """Its exit code, as subprocess has it, or None while it runs."""
        with self._lock:
            self._socket.send(f"ended {pid}".encode())
            answer = self._socket.recv(64).decode()
        return None if answer == "no" else int(answer)

    def close(self):
        self._socket.close()
        self._server.wait()


class Forked:
    def __init__(self, pid, server):
        self.pid = pid
        self._server = server
        self._code = None

    def wait(self, timeout=None):
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._code is None:
            self._code = self._server.ended(self.pid)
            if self._code is None:
                if deadline is not None and time.monotonic() > deadline:
                    raise subprocess.TimeoutExpired("a forked rank", timeout)
                time.sleep(0.005)
        return self._code

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, 9)


def serve_forks(requests):
    import torch.distributed.fsdp  # noqa: F401
    import transformers.models.llama.modeling_llama
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    from rollart.backends.trainers.rank_process import serve

    codes = {}
    while True:
        message, handles, _, _ = socket.recv_fds(requests, 64, 2)
        if not message:
            return
        if message == b"start":
            pid = os.fork()
            if not pid:
                requests.close()
                os.setsid()
                end, log = handles
                os.dup2(log, 1)
                os.dup2(log, 2)
                serve(Connection(end))
            for handle in handles:
                os.close(handle)
            requests.send(str(pid).encode())
            continue
        asked = int(message.split()[1])
        if asked not in codes:
            pid, status = os.waitpid(asked, os.WNOHANG)
            if pid:
                codes[pid] = os.waitstatus_to_exitcode(status)
        requests.send(str(codes.get(asked, "no")).encode())


if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).parent))
    serve_forks(socket.socket(fileno=int(sys.argv[1])))
