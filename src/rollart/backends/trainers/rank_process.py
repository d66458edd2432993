"""The process of a rank other than 0: builds the trainer that rank 0 has, and calls of it what rank 0 says.

`python -m rollart.backends.trainers.rank_process <file descriptor>`; only `ranks` starts it.
"""

import os
import pickle
import queue
import sys
import threading
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

from rollart.backends.trainers.packing import Untrainable
from rollart.backends.trainers.ranks import Failure, Member
from rollart.backends.trainers.torch_trainer import TorchTrainer

Told = tuple[str, tuple[Any, ...]]


def serve(connection: Connection) -> None:
    """Until rank 0 says so or is gone; never returns."""
    os.set_inheritable(connection.fileno(), False)
    try:
        seat, settings = connection.recv()
    except EOFError:
        os._exit(0)
    tasks: queue.SimpleQueue[Told] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(connection, tasks), daemon=True).start()
    try:
        trainer = TorchTrainer(dict(settings), lambda: None, member=Member(seat, connection))
        while True:
            name, args = tasks.get()
            with suppress(Untrainable):  # rank 0 has it too, and answers
                getattr(trainer, name)(*args)
    except BaseException as error:  # noqa: BLE001 - the boundary of the process: told to rank 0, who raises it
        traceback.print_exc()
        where = traceback.extract_tb(error.__traceback__)[-1]
        said = f"{type(error).__name__}: {error} ({os.path.basename(where.filename)}:{where.lineno})"
        with suppress(OSError):
            connection.send(Failure(said, echo=_from_collective(error)))
        os._exit(1)


def _listen(connection: Connection, tasks: "queue.SimpleQueue[Told]") -> None:
    """In a thread of its own, so that the process ends with rank 0 also while it computes or waits for others."""
    try:
        while (told := pickle.loads(connection.recv_bytes())) is not None:
            tasks.put(told)
    except (EOFError, OSError):
        pass
    os._exit(0)


def _from_collective(error: BaseException) -> bool:
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error).lower())


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
