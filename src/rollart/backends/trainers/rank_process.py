"""Process of a rank other than 0: builds the same trainer as rank 0 and executes the calls rank 0 sends.

`python -m rollart.backends.trainers.rank_process <file descriptor> <title>` is a child of rank 0, started only by
`child_ranks`; on a cluster `distributed.ray_ranks` hosts the same `TrainerRank`.
"""

import os
import pickle
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rollart.backends.trainers.packing import Untrainable
from rollart.backends.trainers.ranks import RankHandle
from rollart.backends.trainers.torch_trainer import TorchTrainer
from rollart.ports.ranks import Failure, RankFailed, RankInfo
from rollart.types.rank_shares import Share

Call = tuple[bytes, Share | None]


class TrainerRank:
    """The body of a rank (`ports.ranks.RankBody`)."""

    def __init__(self, settings: Any, info: RankInfo, ready: Callable[[], None]) -> None:
        with _failing():
            self._trainer = TorchTrainer(dict(settings), lambda: None, rank=RankHandle(info, ready))

    def do(self, call: bytes, share: Share | None) -> None:
        with _failing(), suppress(Untrainable):  # rank 0 raises it too, and answers
            name, args = pickle.loads(call)
            getattr(self._trainer, name)(*args, *(() if share is None else (share,)))


@contextmanager
def _failing() -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        traceback.print_exc()
        where = traceback.extract_tb(error.__traceback__)[-1]
        cause = f"{type(error).__name__}: {error} ({os.path.basename(where.filename)}:{where.lineno})"
        raise RankFailed(Failure(cause, echo=_from_collective(error))) from error


def _from_collective(error: BaseException) -> bool:
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error).lower())


def serve(connection: Connection) -> None:
    """Serve until rank 0 closes or is gone; never returns."""
    os.set_inheritable(connection.fileno(), False)
    try:
        info, settings = connection.recv()
    except EOFError:
        os._exit(0)
    calls: queue.SimpleQueue[Call] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(connection, calls), daemon=True).start()
    try:
        body = TrainerRank(settings, info, lambda: connection.send(None))
        while True:
            body.do(*calls.get())
    except RankFailed as error:
        with suppress(OSError):
            connection.send(error.failure)
        os._exit(1)


def _listen(connection: Connection, calls: "queue.SimpleQueue[Call]") -> None:
    """Runs in its own thread, so that the process exits with rank 0 even while it computes or waits in a collective."""
    try:
        while (call := connection.recv()) is not None:
            calls.put(call)
    except (EOFError, OSError):
        pass
    os._exit(0)


if __name__ == "__main__":
    with suppress(OSError):  # what `top` shows
        Path("/proc/self/comm").write_text(sys.argv[2], encoding="utf-8")
    serve(Connection(int(sys.argv[1])))
