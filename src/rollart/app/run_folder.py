"""The folder of a run: one controller at a time, and files that are written atomically."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollart.types.errors import RequestError

CONFIG = "config.json"
CONFIG_DRAFT = f".{CONFIG}.tmp"
"""The only file of a run that was killed before it had a config; it is ignored."""
LOCK = "lock"
JOURNAL = "journal.sqlite"
TRAJECTORIES = "trajectories"
TRANSCRIPTS = "transcripts"


def write_config(folder: Path, text: str) -> None:
    """Write the config; from here on the run can be resumed, wherever it is killed."""
    write_whole(folder / CONFIG, text.encode())


def write_whole(path: Path, content: bytes) -> None:
    """Write a file such that it has its old content or this, wherever the process is killed."""
    draft = path.with_name(f".{path.name}.tmp")
    with draft.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold the exclusive lock of the folder. The kernel releases it when the process ends, however it ends."""
    file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RequestError(
                f"{folder}: this run is still active in another process; wait for it to end or stop it, then resume"
            ) from error
        yield
    finally:
        os.close(file)
