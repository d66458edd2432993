"""Small checkpoints, and processes that die while they write one. Imports no torch: such a process starts quickly."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollart.backends.trainers.checkpoint import STATE, Checkpoints, write_file
from rollart.types.versions import Version

V1, V2, V3 = Version(0, 1), Version(0, 2), Version(0, 3)
FILES = ("config.json", "model.safetensors", "optimizer.safetensors", "random.safetensors", STATE)
"""In the order in which they are written."""
ALTERING = frozenset({"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"})
"""The interpreter's audit events before a call that may alter the disk."""


def contents(version: Version) -> list[tuple[str, bytes]]:
    """What the files of a version hold; to the folder it is only bytes."""
    return [(name, f"{name} of {version} ".encode() * 40) for name in FILES if name != STATE]


def put(root: Path, *versions: Version, **options: Any) -> Checkpoints:
    checkpoints = Checkpoints(root, **options)
    for version in versions:
        checkpoints.save(version, contents(version), {"at": str(version)})
    return checkpoints


def found(root: Path) -> Version | None:
    """The version that a trainer would start from; its files are those that were saved under it."""
    checkpoint = Checkpoints(root).newest()
    if checkpoint is None:
        return None
    assert {name: checkpoint.file(name).read_bytes() for name in checkpoint.files} == dict(contents(checkpoint.version))
    assert checkpoint.facts == {"at": str(checkpoint.version)}
    return checkpoint.version


def names(root: Path) -> list[str]:
    return sorted(entry.name for entry in root.iterdir())


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at_every_boundary(root: Path) -> None:
    """Save V2 after V1 in `root/<n>`, for every n, by a process killed before its n-th call that alters the disk."""
    _in_children(root, _save_until)


def die_in_every_file(root: Path) -> None:
    """The same, killed with half of the n-th file written; the last one lives."""

    def save_half(folder: Path, file: int) -> None:
        def write(path: Path, data: bytes) -> None:
            if FILES.index(path.name) + 1 == file:
                write_file(path, data[: len(data) // 2])
                die()
            write_file(path, data)

        put(folder, V2, keep=1, write=write)

    _in_children(root, save_half)


def _save_until(folder: Path, boundary: int) -> None:
    left = boundary

    def reach() -> None:
        nonlocal left
        left -= 1
        if not left:
            die()

    fsync = os.fsync

    def fsync_after(handle: int) -> None:
        reach()
        fsync(handle)

    os.fsync = fsync_after
    sys.addaudithook(lambda event, _arguments: reach() if event in ALTERING else None)
    put(folder, V2, keep=1)


def _in_children(root: Path, save: Callable[[Path, int], None]) -> None:
    """One process for each number, until one lives to the end of its save."""
    for number in range(1, 1000):
        folder = root / f"{number:03}"
        put(folder, V1)
        child = os.fork()
        if not child:
            save(folder, number)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            assert status == 0, f"number {number} ended with {status}"
            return
