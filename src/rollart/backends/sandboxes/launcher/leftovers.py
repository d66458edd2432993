"""What launchers leave behind whose processes were all killed at once: folders and cgroups.

Mounts and processes need no care: they end with the last process of the launcher's mount namespace, and with the
keepers. Every launcher holds a lock in its folder as long as it, or a supervisor of it, lives; so does a worker in the
folder of its snapshots. Sandboxes, and so their cgroups,
have the name of their launcher's folder in their own.
"""

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path

from rollart.backends.sandboxes.launcher import roots
from rollart.backends.sandboxes.launcher.cgroups import Group, Tree

PREFIX = "launcher-"
LOCK = "lock"
ENDING_S = 5.0


def own(work: Path) -> int:
    """Lock a folder until this process and all its children are gone. The file is locked before it gets its name."""
    draft = work / f"{LOCK}.draft"
    file = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(file, fcntl.LOCK_EX)
    draft.rename(work / LOCK)
    return file


def remove(parent: Path, tree: Tree) -> None:
    """Remove folders and cgroups of launchers and workers that are gone."""
    for path in parent.glob(f"*/{LOCK}"):
        with suppress(OSError):  # its launcher lives, or another launcher removes it now
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for folder in tree.folders():
                    for group in folder.glob(f"{path.parent.name}.*"):
                        remove_group(Group(tree, group.name))
                roots.remove(path.parent)
            finally:
                os.close(file)


def remove_group(group: Group) -> None:
    deadline = time.monotonic() + ENDING_S
    while not group.remove() and time.monotonic() < deadline:
        time.sleep(0.002)
