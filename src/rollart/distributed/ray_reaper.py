"""Ends what is left of a Ray when its controller is gone, however it went.

Run as a script, by path, with nothing but the standard library: `python ray_reaper.py <folder>`. Its standard input is
a pipe that the controller holds open and that the kernel closes with it. Then every process that carries the mark of
this Ray in its environment is killed, what workers started included, and the folder of this Ray is removed.
"""

import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

MARK = "ROLLART_RAY"
"""In the environment of all that is started; its value is the folder of this Ray, which is nobody else's."""
PATIENCE_S = 10.0


def processes(folder: str) -> list[int]:
    """The living processes of the Ray in `folder`, this one excepted."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):  # gone meanwhile, or another user's
                if _carries_mark(entry, folder) or _is_rays_own(entry, folder):
                    found.append(int(entry.name))
    return found


def _carries_mark(process: Path, folder: str) -> bool:
    return f"{MARK}={folder}".encode() in (process / "environ").read_bytes().split(b"\0")


def _is_rays_own(process: Path, folder: str) -> bool:
    """Some of Ray's processes write their titles over their environment; those log to the folder."""
    if not (process / "cmdline").read_bytes().startswith(b"ray::"):
        return False
    for file in (process / "fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            if os.readlink(file).startswith(folder + "/"):
                return True
    return False


def reap(folder: str) -> None:
    """Kill them all, those too that are started meanwhile."""
    deadline = time.monotonic() + PATIENCE_S
    while (left := processes(folder)) and time.monotonic() < deadline:
        for process in left:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.01)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.stdin.buffer.read()
    reap(sys.argv[1])
