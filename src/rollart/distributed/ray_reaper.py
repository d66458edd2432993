"""Kills what is left of a Ray when its controller is gone, however it ended.

Run as a script, by path, with only the standard library: `python ray_reaper.py <folder>`. Its standard input is a pipe
that the controller holds open and that the kernel closes with it. Then every process with the mark of this Ray in its
environment is killed, including those that workers started, and the folder of this Ray is removed.

If the reaper was killed as well, the next Ray does its work before it starts: the folder of a Ray has a file that its
controller holds locked, and the kernel releases that lock with the process.
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
"""Environment variable of all processes of a Ray; its value is the folder of this Ray, which is unique."""
PREFIX = "rollart-ray-"
"""Prefix of Ray folders."""
TITLES = (b"ray::", b"rollart: ")
"""Prefixes of the process titles set by Ray and by `ray_process`."""
OWNER = "owner"
PATIENCE_S = 10.0
LOOK_S = 0.05


def own(folder: str) -> int:
    """Mark this process as alive while the returned file stays open. The file is locked before it gets its name."""
    path = Path(folder) / OWNER
    draft = path.with_suffix(".draft")
    file = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(file, fcntl.LOCK_EX)
    draft.rename(path)
    return file


def reap_orphans(parent: str) -> None:
    """Kill what is left of every Ray below `parent` whose controller is gone."""
    for path in Path(parent).glob(f"{PREFIX}*/{OWNER}"):
        with suppress(OSError):  # its controller lives, it is another user's, or it has just gone
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                reap(str(path.parent))
            finally:
                os.close(file)


def processes(folder: str) -> list[int]:
    """Living processes of the Ray in `folder`, except this one."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):  # just ended, or another user's
                if _carries_mark(entry, folder) or _is_rays_own(entry, folder):
                    found.append(int(entry.name))
    return found


def _carries_mark(process: Path, folder: str) -> bool:
    return f"{MARK}={folder}".encode() in (process / "environ").read_bytes().split(b"\0")


def _is_rays_own(process: Path, folder: str) -> bool:
    """Some of Ray's processes and the workers overwrite their environment with a title; those log to the folder."""
    if not (process / "cmdline").read_bytes().startswith(TITLES):
        return False
    for file in (process / "fd").iterdir():
        with suppress(OSError):  # just closed
            if os.readlink(file).startswith(folder + "/"):
                return True
    return False


def _is_resource_tracker(process: int) -> bool:
    """Python's resource tracker for shared memory, which exits by itself after the processes that it tracks."""
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return False


def reap(folder: str) -> None:
    """Kill all processes, including those started meanwhile; a freshly forked one has no mark yet.

    Resource trackers come last: killed with the rest they would leak shared memory.
    """
    deadline = time.monotonic() + PATIENCE_S
    looks_without = 0
    while looks_without < 2 and time.monotonic() < deadline:
        left = processes(folder)
        looks_without = 0 if left else looks_without + 1
        for process in left:
            if time.monotonic() < deadline - PATIENCE_S / 2 and _is_resource_tracker(process):
                continue
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(LOOK_S)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.stdin.buffer.read()
    reap(sys.argv[1])
