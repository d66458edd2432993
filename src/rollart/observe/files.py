"""Files that grow while a run goes on."""

import errno
import os
from pathlib import Path


def append_whole(path: Path, data: bytes) -> None:
    """Add to a file, all of it or nothing: what a full disk cuts off is taken back."""
    with path.open("ab", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        if file.write(data) != len(data):
            file.truncate(size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
