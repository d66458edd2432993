"""Files that grow during a run."""

import errno
import os
from pathlib import Path


def append_whole(path: Path, data: bytes) -> None:
    """Append atomically: a partial write, as on a full disk, is undone."""
    with path.open("ab", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        if file.write(data) != len(data):
            file.truncate(size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
