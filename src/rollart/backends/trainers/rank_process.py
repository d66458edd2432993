"""Process of a rank other than 0: builds the same trainer as rank 0 and executes the calls rank 0 sends.

`python -m rollart.backends.trainers.rank_process <file descriptor> <title>`; started only by `ranks`.
"""

import os
import pickle
import queue
import sys
import threading
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rollart.backends.trainers.packing import Untrainable
from rollart.backends.trainers.ranks import Failure, RankHandle
from rollart.backends.trainers.torch_trainer import TorchTrainer

Call = tuple[str, tuple[Any, ...]]


def serve(connection: Connection) -> None:
    """Serve until rank 0 closes or is gone; never returns."""
    os.set_inheritable(connection.fileno(), False)
    try:
        info, settings = connection.recv()
    except EOFError:
        os._exit(0)
    tasks: queue.SimpleQueue[Call] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(connection, tasks), daemon=True).start()
    try:
        trainer = TorchTrainer(dict(settings), lambda: None, rank=RankHandle(info, connection))
        while True:
            name, args = tasks.get()
            with suppress(Untrainable):  # rank 0 raises it too, and answers
                getattr(trainer, name)(*args)
    except BaseException as error:  # noqa: BLE001 - the process boundary: reported to rank 0, which raises it
        traceback.print_exc()
        where = traceback.extract_tb(error.__traceback__)[-1]
        cause = f"{type(error).__name__}: {error} ({os.path.basename(where.filename)}:{where.lineno})"
        with suppress(OSError):
            connection.send(Failure(cause, echo=_from_collective(error)))
        os._exit(1)


def _listen(connection: Connection, tasks: "queue.SimpleQueue[Call]") -> None:
    """Runs in its own thread, so that the process exits with rank 0 even while it computes or waits in a collective."""
    try:
        while (call := pickle.loads(connection.recv_bytes())) is not None:
            tasks.put(call)
    except (EOFError, OSError):
        pass
    os._exit(0)


def _from_collective(error: BaseException) -> bool:
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error).lower())


if __name__ == "__main__":
    with suppress(OSError):  # what `top` shows
        Path("/proc/self/comm").write_text(sys.argv[2], encoding="utf-8")
    serve(Connection(int(sys.argv[1])))
