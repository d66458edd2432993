"""Weight stores: simulated, in memory, in shared memory, in a folder."""

import pickle
from collections.abc import Callable
from pathlib import Path

from harnesses.common import corrupt_memory, flipped
from rollart.backends.stores.folder import FolderStore
from rollart.backends.stores.memory import MemoryStore
from rollart.backends.stores.shared import SharedMemoryStore
from rollart.conformance.weights import WeightStoreHarness
from rollart.sim.store import SimStore
from rollart.types.versions import Version


def simulated_store(scratch: Path) -> WeightStoreHarness:  # noqa: ARG001 - it writes nothing down
    store = SimStore()
    return WeightStoreHarness(store=store, corrupt=store.corrupt)


def memory_store(scratch: Path) -> WeightStoreHarness:  # noqa: ARG001 - it writes nothing down
    store = MemoryStore()
    return WeightStoreHarness(store=store, corrupt=lambda version, index: corrupt_memory(store, version, index))


def shared_store(scratch: Path) -> WeightStoreHarness:
    """Its own root, so that tests that run at once do not clear each other away."""
    store = SharedMemoryStore.create("conformance", slot_bytes=1 << 16, root=scratch)

    def corrupt(version: Version, index: int) -> None:
        data = bytes(store.bucket(version, index))
        for slot in scratch.glob("rollart-conformance/slot-*"):
            slot.write_bytes(slot.read_bytes().replace(data, flipped(data)))

    return WeightStoreHarness(store=store, corrupt=corrupt, reopen=lambda: pickle.loads(pickle.dumps(store)))


def folder_store(scratch: Path) -> WeightStoreHarness:
    store = FolderStore(scratch / "weights")

    def corrupt(version: Version, index: int) -> None:
        path = scratch / f"weights/step-{version.step:08}.epoch-{version.epoch}/bucket-{index:05}.safetensors"
        data = store.bucket(version, index)
        path.write_bytes(path.read_bytes().replace(data, flipped(data)))

    return WeightStoreHarness(store=store, corrupt=corrupt, reopen=lambda: pickle.loads(pickle.dumps(store)))


STORES: dict[str, Callable[[Path], WeightStoreHarness]] = {
    "sim": simulated_store,
    "memory": memory_store,
    "shared": shared_store,
    "folder": folder_store,
}
