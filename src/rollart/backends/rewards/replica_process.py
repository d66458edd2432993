"""Child process with a replica of a reward function; started only by `child_replica`."""

import ctypes
import json
import os
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

from rollart.backends.rewards.child_replica import READY
from rollart.ports.factory import load, moved
from rollart.ports.reward_call import shown

PR_SET_PDEATHSIG = 1


def main(descriptor: str, parent: str, body: str, function: str, moves: str) -> None:
    """Serve until the reward worker closes or is gone."""
    _end_with(int(parent))
    connection = Connection(int(descriptor))
    os.set_inheritable(connection.fileno(), False)
    for before, after in json.loads(moves):
        moved(Path(before), Path(after))
    try:
        answer = load(body)(function)
    except BaseException as error:  # noqa: BLE001 - the boundary of user code: its module is imported here
        connection.send_bytes(f"{type(error).__name__}: {shown(error)}".encode())
        return
    connection.send_bytes(READY)
    try:
        while True:
            connection.send_bytes(answer(connection.recv_bytes()))
    # Not through the interpreter's end, which waits for threads that the function may have left behind.
    except (EOFError, OSError):
        sys.stdout.flush()
        os._exit(0)
    except BaseException:  # noqa: BLE001 - the worker sees the exit code
        traceback.print_exc()
        os._exit(1)


def _end_with(parent: int) -> None:
    """Have the kernel end this process together with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run, which ends its workers in order
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
