"""The ranks of one trainer: rank 0 is the worker that the controller talks to, the others are its child processes.

    worker, rank 0 ──(one socket each: calls)──► rank 1 … rank n−1            started here, they exit with rank 0
         │  ◄──(ready; cause of a failure)─────────────┘
         └── collectives over gloo (CPU) or NCCL (CUDA): all ranks call the same method of their trainer concurrently

Invariants:
- A rank exits when its socket closes, so none outlives rank 0, however rank 0 ended.
- A rank that exits or raises is noticed at once, not after a collective's timeout: `check` and `do` raise `TrainerLost`
  with the rank and its cause, and the other ranks are terminated.
- A call is sent to all ranks before rank 0 makes it itself, so between two calls of `do` no rank waits for another.

torch has one process group per process, hence one trainer with several ranks at a time.
"""

import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rollart.backends.trainers.packing import Untrainable
from rollart.types.errors import RequestError, RollartError, TrainerLost

T = TypeVar("T")

PROCESS = "rollart.backends.trainers.rank_process"
COLLECTIVE_TIMEOUT_S = 600.0
"""Timeout for starting ranks, and for a live rank that does not take part in a collective."""
BLAME_S = 3.0
"""How long a failed collective waits to learn which rank caused it."""
CLOSE_S = 5.0
ANOTHER_S = 10.0
"""How long a trainer waits for another one in this process to close."""
LOG_TAIL_BYTES = 2000
_PROCESS_GROUP_LOCK = threading.Lock()


class Failure(NamedTuple):
    """Why a rank ended."""

    cause: str
    echo: bool = False
    """The rank only observed the loss of another one."""


class Ready(NamedTuple):
    """A rank has built its model and is about to join the process group."""


class Process(Protocol):
    def wait(self, timeout: float | None = None) -> int: ...
    def kill(self) -> None: ...


class RankInfo(NamedTuple):
    """What a rank needs to join the process group."""

    rank: int
    ranks: int
    rendezvous: str
    device: str

    def join(self) -> DeviceMesh:
        """Returns once all ranks have joined."""
        device = torch.device(self.device, self.rank) if self.device == "cuda" else None
        if device is not None:
            torch.cuda.set_device(device)
        dist.init_process_group(
            "gloo" if device is None else "nccl",
            store=dist.FileStore(self.rendezvous, self.ranks),  # type: ignore[attr-defined]  # exported, not listed
            rank=self.rank,
            world_size=self.ranks,
            timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
            device_id=device,
        )
        return init_device_mesh(self.device, (self.ranks,))


class RankHandle(NamedTuple):
    """A rank's membership in the group, in its own process."""

    info: RankInfo
    connection: Connection

    def meet(self) -> DeviceMesh:
        self.connection.send(Ready())
        return self.info.join()


class Ranks:
    """All ranks, as seen by rank 0."""

    def __init__(self, settings: Any, ranks: int, device: str, wake: Callable[[], None]) -> None:
        """Starts the other ranks with these settings, which must be picklable; `wake` is called when one is lost."""
        if device not in ("cpu", "cuda"):
            raise RequestError(f"{ranks} ranks cannot share {device!r}; set `device` to cpu, or to cuda (one GPU each)")
        if device == "cuda" and torch.cuda.device_count() < ranks:
            raise RequestError(f"{ranks} ranks need one GPU each; found {torch.cuda.device_count()}. Lower `ranks`")
        self._folder = tempfile.TemporaryDirectory(prefix="rollart-ranks-")
        if not _PROCESS_GROUP_LOCK.acquire(timeout=ANOTHER_S):
            self._folder.cleanup()
            raise RequestError("this process already has a trainer with several ranks; close it, or use a new process")
        self._wake = wake
        self._changed = threading.Condition()
        self._ready: set[int] = set()
        self._reported: dict[int, Failure] = {}
        self._failures: dict[int, Failure] = {}
        self._closed = False
        self._processes: dict[int, Process] = {}
        self._connections: dict[int, Connection] = {}
        self.info = RankInfo(0, ranks, str(Path(self._folder.name, "rendezvous")), device)
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        try:
            for rank in range(1, ranks):
                self._start(rank, settings)
        except BaseException:
            self._watcher.start()
            self.close()
            raise
        self._watcher.start()

    def meet(self) -> DeviceMesh:
        """Wait until the other ranks are ready, then join the process group."""
        with self._changed:
            there = self._changed.wait_for(
                lambda: bool(self._failures) or len(self._ready) == len(self._processes), COLLECTIVE_TIMEOUT_S
            )
        self.check()
        if not there:
            late = sorted(self._processes.keys() - self._ready)
            raise TrainerLost(f"ranks {late} of the trainer did not start within {COLLECTIVE_TIMEOUT_S:g} s")
        if dist.is_initialized():
            raise RequestError("torch.distributed is already in use in this process; run the trainer in its own")
        return self.info.join()

    def do(self, work: Callable[..., T], *args: Any) -> T:
        """Call this method on every rank's trainer; returns the local result.

        Deliberate errors are raised by all ranks at the same point; `Untrainable` leaves them usable.
        """
        self.check()
        call = pickle.dumps((work.__name__, args))
        try:
            for connection in self._connections.values():
                connection.send_bytes(call)
            return work(*args)
        except (Untrainable, RollartError):
            raise
        except Exception as error:
            lost = self._blame()
            if lost is None:
                raise
            raise lost from error

    def check(self) -> None:
        """Raise `TrainerLost` if a rank is gone."""
        if self._failures:
            lost = self._blame()
            assert lost is not None
            raise lost

    def close(self) -> None:
        """Terminate the other ranks, whatever they are doing, and leave the process group."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
        for connection in self._connections.values():
            with suppress(OSError):
                connection.send_bytes(pickle.dumps(None))
        for process in self._processes.values():
            try:
                process.wait(CLOSE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._watcher.join()
        if dist.is_initialized():
            dist.destroy_process_group()
        self._folder.cleanup()
        _PROCESS_GROUP_LOCK.release()

    def _start(self, rank: int, settings: Any) -> None:
        ours, theirs = socket.socketpair()
        with theirs, self._log(rank).open("wb") as log:
            self._processes[rank] = start_process(theirs, log, rank)
        self._connections[rank] = Connection(ours.detach())
        with suppress(OSError):  # already gone; `meet` reports why
            self._connections[rank].send((self.info._replace(rank=rank), settings))

    def _log(self, rank: int) -> Path:
        return Path(self._folder.name, f"rank-{rank}.log")

    def _watch(self) -> None:
        """Runs until the last rank has ended."""
        listening = {connection: rank for rank, connection in self._connections.items()}
        while listening:
            for connection in wait(list(listening)):
                assert isinstance(connection, Connection)
                rank = listening[connection]
                try:
                    message = connection.recv()
                except (EOFError, OSError):
                    del listening[connection]
                    connection.close()
                    self._ended(rank)
                    continue
                with self._changed:
                    if isinstance(message, Ready):
                        self._ready.add(rank)
                    else:
                        self._reported[rank] = message
                    self._changed.notify_all()

    def _ended(self, rank: int) -> None:
        if self._closed:
            return
        failure = self._reported.get(rank) or Failure(self._exit_cause(rank))
        with self._changed:
            self._failures[rank] = failure
            self._changed.notify_all()
        if self.info.device == "cuda" and dist.group.WORLD is not None:
            dist.group.WORLD.abort()  # gloo notices a lost rank, NCCL would wait
        self._wake()

    def _exit_cause(self, rank: int) -> str:
        try:
            code = self._processes[rank].wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            return "it closed its connection and hangs"
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        output = self._log(rank).read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace").strip()
        return f"{how}; last output: {output}" if output else how

    def _blame(self) -> TrainerLost | None:
        """The rank that failed first; ranks that failed because of it may have reported earlier."""
        with self._changed:
            self._changed.wait_for(lambda: any(not each.echo for each in self._failures.values()), BLAME_S)
            failures = sorted(self._failures.items(), key=lambda each: each[1].echo)
        if not failures:
            return None
        self.close()
        rank, failure = failures[0]
        return TrainerLost(
            f"rank {rank} of {self.info.ranks} of the trainer is lost: {failure.cause}. "
            "The trainer restarts from its last checkpoint."
        )


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
