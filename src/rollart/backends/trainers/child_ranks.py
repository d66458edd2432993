"""Ranks as child processes of rank 0, on its machine, each with a socket to it.

A rank exits when its socket closes, so none outlives rank 0, however rank 0 ended.
"""

import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Protocol

import torch

from rollart.ports.ranks import Failure, RankListener, RankOrder
from rollart.types.errors import InvariantBroken, RequestError
from rollart.types.ids import ClaimId, WorkerId
from rollart.types.rank_shares import Share

PROCESS = "rollart.backends.trainers.rank_process"
LOOPBACK = "127.0.0.1"
CLOSE_S = 5.0
LOG_TAIL_BYTES = 2000


class Process(Protocol):
    def wait(self, timeout: float | None = None) -> int: ...
    def kill(self) -> None: ...


class ChildRanks:
    """Starts ranks as child processes (`ports.ranks.RankStarter`)."""

    def address(self) -> str:
        return LOOPBACK

    def sender(self, worker: WorkerId) -> None:
        """Rank 0 has the batch in its own memory, or on its own machine."""

    def start(self, order: RankOrder, listener: RankListener) -> "ChildGroup":
        info = order.info
        if info.device == "cuda" and torch.cuda.device_count() < info.ranks:
            raise RequestError(
                f"{info.ranks} ranks need one GPU each; found {torch.cuda.device_count()}. Lower `ranks`"
            )
        return ChildGroup(order, listener)


class ChildGroup:
    """The started processes (`ports.ranks.RankGroup`)."""

    def __init__(self, order: RankOrder, listener: RankListener) -> None:
        self._listener = listener
        self._folder = tempfile.TemporaryDirectory(prefix="rollart-ranks-")
        self._processes: dict[int, Process] = {}
        self._connections: dict[int, Connection] = {}
        self._closing = False
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        try:
            for rank in range(1, order.info.ranks):
                self._start(rank, order)
        except BaseException:
            self._watcher.start()
            self.close()
            raise
        self._watcher.start()

    def call(self, rank: int, call: bytes, share: Share | None = None) -> None:
        self._connections[rank].send((call, share))

    def call_with_share_of(self, rank: int, call: bytes, claim: ClaimId) -> None:  # noqa: ARG002
        raise InvariantBroken("child processes get their shares from rank 0, not from the controller")

    def close(self) -> None:
        self._closing = True
        for connection in self._connections.values():
            with suppress(OSError):
                connection.send(None)
        for process in self._processes.values():
            try:
                process.wait(CLOSE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._watcher.join()
        self._folder.cleanup()

    def _start(self, rank: int, order: RankOrder) -> None:
        ours, theirs = socket.socketpair()
        with theirs, self._log(rank).open("wb") as log:
            self._processes[rank] = start_process(theirs, log, rank)
        self._connections[rank] = Connection(ours.detach())
        with suppress(OSError):  # already gone; the watcher reports why
            self._connections[rank].send((order.info._replace(rank=rank), order.settings))

    def _log(self, rank: int) -> Path:
        return Path(self._folder.name, f"rank-{rank}.log")

    def _watch(self) -> None:
        """Runs until the last rank has ended."""
        listening = {connection: rank for rank, connection in self._connections.items()}
        reported: dict[int, Failure] = {}
        while listening:
            for connection in wait(list(listening)):
                assert isinstance(connection, Connection)
                rank = listening[connection]
                try:
                    message = connection.recv()
                except (EOFError, OSError, pickle.UnpicklingError):
                    del listening[connection]
                    connection.close()
                    if not self._closing:
                        self._listener.ended(rank, reported.get(rank) or Failure(self._exit_cause(rank)))
                    continue
                if message is None:
                    self._listener.ready(rank)
                else:
                    reported[rank] = message

    def _exit_cause(self, rank: int) -> str:
        try:
            code = self._processes[rank].wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            return "it closed its connection and hangs"
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        output = self._log(rank).read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace").strip()
        return f"{how}; last output: {output}" if output else how


def start_process(end: socket.socket, log: IO[bytes], rank: int) -> Process:
    """Start a rank with its end of the socket, in its own session: a terminal interrupt goes to rank 0 only."""
    return subprocess.Popen(
        [sys.executable, "-m", PROCESS, str(end.fileno()), f"trainer rank {rank}"],
        pass_fds=(end.fileno(),),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
