"""Small versions without torch, and publishers in processes of their own that are killed where it hurts."""

import multiprocessing
import os
import signal
from collections.abc import Callable
from typing import Any

import rollart.backends.stores.folder as folder_module
import rollart.backends.stores.shared as shared_module
from rollart.conformance.weights import make
from rollart.ports.weights import WeightStore
from rollart.types.versions import Version

SPAWN = multiprocessing.get_context("spawn")

POINTS: dict[str, tuple[Any, str, int]] = {
    "shared: before its slot is taken": (shared_module.SharedMemoryStore, "_claim", 1),
    "shared: slot taken, nothing written": (shared_module.SharedMemoryStore, "_mapped", 1),
    "shared: first bucket written": (shared_module, "copy_bucket", 2),
    "shared: all but the last bucket written": (shared_module, "copy_bucket", 3),
    "shared: before the commit": (shared_module, "_replace", 2),
    "folder: before its draft is made": (folder_module.FolderStore, "_clear_drafts", 1),
    "folder: first bucket written": (folder_module, "verify_bucket", 1),
    "folder: last bucket written": (folder_module, "verify_bucket", 3),
    "folder: before the draft is whole": (folder_module, "_sync_folder", 1),
    "folder: before the commit": (folder_module.FolderStore, "_commit", 1),
}
"""Where a publisher can be killed: in whose call of what. The slots are full, so that one is evicted first."""


def die(store: WeightStore, version: Version, point: str) -> None:
    """Publish, and be killed at that point."""
    owner, name, nth = POINTS[point]
    inner, calls = getattr(owner, name), []

    def deadly(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        if len(calls) == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        return inner(*args, **kwargs)

    setattr(owner, name, deadly)
    store.publish(*make(version))


def read_all(store: WeightStore, versions: list[Version], answers: Any) -> None:
    """Tell what a reader in another process sees."""
    answers.put([[bytes(store.bucket(version, index)) for index in range(3)] for version in versions])


def publish_many(store: WeightStore, epoch: int, count: int) -> None:
    for step in range(1, count + 1):
        store.publish(*make(Version(epoch, step)))


def in_process(function: Callable[..., None], *args: Any) -> int:
    """Run in a fresh process; its exit code."""
    process = SPAWN.Process(target=function, args=args)
    process.start()
    process.join(60)
    assert process.exitcode is not None, f"{function.__name__} did not end"
    return process.exitcode
