"""The ranks of one trainer: rank 0 is the worker that the controller talks to, the others are processes of its own.

    worker, rank 0 ──(a socket each: what to do)──► rank 1 … rank n−1         started here, they end with rank 0
         │  ◄──(ready; why it failed)──────────────────┘
         └── collectives over gloo (CPU) or NCCL (CUDA): all ranks call the same method of their trainer, side by side

What holds:
- a rank ends when its socket does, so none outlives rank 0, however rank 0 ended;
- a rank that ends or raises is noticed at once, not by the time limit of a collective: `check` and `do` raise
  `TrainerLost`, which names the rank and its cause, and the other ranks are ended;
- what is told to a rank is complete before rank 0 goes on, so between two calls of `do` no rank waits for another.

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
"""Of a rank that lives and does not answer, and of the start."""
BLAME_S = 3.0
"""So long a failed collective waits to hear which rank it was."""
CLOSE_S = 5.0
ANOTHER_S = 10.0
"""So long a trainer waits for another of this process to close."""
LAST_WORDS_BYTES = 2000
_ONE_AT_A_TIME = threading.Lock()


class Failure(NamedTuple):
    """Why a rank ended."""

    cause: str
    echo: bool = False
    """It only noticed that another one was gone."""


class Ready(NamedTuple):
    """A rank has built its model and is about to join the others."""


class Process(Protocol):
    def wait(self, timeout: float | None = None) -> int: ...
    def kill(self) -> None: ...


class Seat(NamedTuple):
    """What a rank has to know to join."""

    rank: int
    ranks: int
    rendezvous: str
    device: str

    def join(self) -> DeviceMesh:
        """Returns when all ranks are there."""
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


class Member(NamedTuple):
    """A rank's own place in the group, in its process."""

    seat: Seat
    connection: Connection

    def meet(self) -> DeviceMesh:
        self.connection.send(Ready())
        return self.seat.join()


class Ranks:
    """All ranks, as rank 0 sees them."""

    def __init__(self, settings: Any, ranks: int, device: str, wake: Callable[[], None]) -> None:
        """Starts the other ranks with these settings, which have to be picklable; `wake` is called when one is lost."""
        if device not in ("cpu", "cuda"):
            raise RequestError(f"{ranks} ranks cannot share {device!r}; set `device` to cpu, or to cuda: one GPU each")
        if device == "cuda" and torch.cuda.device_count() < ranks:
            raise RequestError(f"{ranks} ranks need a GPU each, there are {torch.cuda.device_count()}; lower `ranks`")
        self._folder = tempfile.TemporaryDirectory(prefix="rollart-ranks-")
        if not _ONE_AT_A_TIME.acquire(timeout=ANOTHER_S):
            self._folder.cleanup()
            raise RequestError("this process has a trainer with several ranks already; close it, or use another one")
        self._wake = wake
        self._changed = threading.Condition()
        self._ready: set[int] = set()
        self._said: dict[int, Failure] = {}
        self._failures: dict[int, Failure] = {}
        self._closed = False
        self._processes: dict[int, Process] = {}
        self._connections: dict[int, Connection] = {}
        self.seat = Seat(0, ranks, str(Path(self._folder.name, "rendezvous")), device)
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
        """Join the others, once they are as far."""
        with self._changed:
            there = self._changed.wait_for(
                lambda: bool(self._failures) or len(self._ready) == len(self._processes), COLLECTIVE_TIMEOUT_S
            )
        self.check()
        if not there:
            late = sorted(self._processes.keys() - self._ready)
            raise TrainerLost(f"ranks {late} of the trainer did not start within {COLLECTIVE_TIMEOUT_S:g} s")
        if dist.is_initialized():
            raise RequestError("torch.distributed is in use in this process; give the trainer a process of its own")
        return self.seat.join()

    def do(self, work: Callable[..., T], *args: Any) -> T:
        """Have every rank call this method of its trainer; gives what it returned here.

        What is raised on purpose all ranks raise, in the same place; `Untrainable` leaves them usable.
        """
        self.check()
        told = pickle.dumps((work.__name__, args))
        try:
            for connection in self._connections.values():
                connection.send_bytes(told)
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
        """End the other ranks, whatever they do, and leave the group."""
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
        _ONE_AT_A_TIME.release()

    def _start(self, rank: int, settings: Any) -> None:
        ours, theirs = socket.socketpair()
        with theirs, self._log(rank).open("wb") as log:
            self._processes[rank] = start_process(theirs, log)
        self._connections[rank] = Connection(ours.detach())
        with suppress(OSError):  # it is gone already, and `meet` says why
            self._connections[rank].send((self.seat._replace(rank=rank), settings))

    def _log(self, rank: int) -> Path:
        return Path(self._folder.name, f"rank-{rank}.log")

    def _watch(self) -> None:
        """Until the last rank has ended."""
        listening = {connection: rank for rank, connection in self._connections.items()}
        while listening:
            for connection in wait(list(listening)):
                assert isinstance(connection, Connection)
                rank = listening[connection]
                try:
                    said = connection.recv()
                except (EOFError, OSError):
                    del listening[connection]
                    connection.close()
                    self._ended(rank)
                    continue
                with self._changed:
                    if isinstance(said, Ready):
                        self._ready.add(rank)
                    else:
                        self._said[rank] = said
                    self._changed.notify_all()

    def _ended(self, rank: int) -> None:
        if self._closed:
            return
        failure = self._said.get(rank) or Failure(self._last_words(rank))
        with self._changed:
            self._failures[rank] = failure
            self._changed.notify_all()
        if self.seat.device == "cuda" and dist.group.WORLD is not None:
            dist.group.WORLD.abort()  # gloo notices that a rank is gone, NCCL would wait
        self._wake()

    def _last_words(self, rank: int) -> str:
        try:
            code = self._processes[rank].wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            return "it closed its connection and hangs"
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        words = self._log(rank).read_bytes()[-LAST_WORDS_BYTES:].decode(errors="replace").strip()
        return f"{how}; its last words: {words}" if words else how

    def _blame(self) -> TrainerLost | None:
        """Who was the first; those that it took along may be heard before it."""
        with self._changed:
            self._changed.wait_for(lambda: any(not each.echo for each in self._failures.values()), BLAME_S)
            failures = sorted(self._failures.items(), key=lambda each: each[1].echo)
        if not failures:
            return None
        self.close()
        rank, failure = failures[0]
        return TrainerLost(
            f"rank {rank} of {self.seat.ranks} of the trainer is lost: {failure.cause}. "
            "The trainer starts again from its last checkpoint."
        )


def start_process(end: socket.socket, log: IO[bytes]) -> Process:
    """A rank, with its end of the connection. In a session of its own: an interrupt from the terminal is for rank 0."""
    return subprocess.Popen(
        [sys.executable, "-m", PROCESS, str(end.fileno())],
        pass_fds=(end.fileno(),),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
