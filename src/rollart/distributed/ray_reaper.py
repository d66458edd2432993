"""Ends what is left of a Ray when its controller is gone, however it went.

Run as a script, by path, with nothing but the standard library: `python ray_reaper.py <folder>`. Its standard input is
a pipe that the controller holds open and that the kernel closes with it. Then every process that carries the mark of
this Ray in its environment is killed, what workers started included, and the folder of this Ray is removed.

Where the reaper was killed as well, the next Ray does its work before it starts: the folder of a Ray has a file that
its controller holds locked, and the kernel gives that lock up with it.
"""

import fcntl
import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

MARK = "ROLLART_RAY"
"""In the environment of all that is started; its value is the folder of this Ray, which is nobody else's."""
PREFIX = "rollart-ray-"
"""How folders of a Ray are named."""
OWNER = "owner"
PATIENCE_S = 10.0
LOOK_S = 0.05


def own(folder: str) -> int:
    """Say that this process lives, for as long as the file given stays open. It has its name once it is locked."""
    path = Path(folder) / OWNER
    draft = path.with_suffix(".draft")
    file = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(file, fcntl.LOCK_EX)
    draft.rename(path)
    return file


def reap_orphans(parent: str) -> None:
    """End what is left of every Ray below `parent` whose controller is gone."""
    for path in Path(parent).glob(f"{PREFIX}*/{OWNER}"):
        with suppress(OSError):  # its controller lives, it is another user's, or it is gone meanwhile
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                reap(str(path.parent))
            finally:
                os.close(file)


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
    """Kill them all, those too that are started meanwhile; one that was only just forked has no mark yet."""
    deadline = time.monotonic() + PATIENCE_S
    looks_without = 0
    while looks_without < 2 and time.monotonic() < deadline:
        left = processes(folder)
        looks_without = 0 if left else looks_without + 1
        for process in left:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(LOOK_S)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.stdin.buffer.read()
    reap(sys.argv[1])
