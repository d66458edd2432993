"""A weight store in shared memory of one machine: a fixed number of preallocated version slots.

    /dev/shm/rollart-<name>/
        owner             locked by the process that created the store, for as long as it lives
        index.json        the version in each slot; replaced atomically, under the lock of `index.lock`
        slot-0, slot-1…   each: the manifest, then its buckets, every part aligned to a page

Files and file locks rather than `multiprocessing.shared_memory`, whose resource tracker removes segments that other
processes still use: the kernel releases a lock with the process that held it, so that a crash leaves nothing locked.

Invariants:
- a version is in the index, completely copied and verified, or it is not: a publisher killed at any point leaves the
  earlier versions intact, and its slot free;
- versions only grow, whichever processes publish, also past those that were dropped;
- a version is held together with its dependency (the full version under an adapter);
- a reader's views are the slot itself. While one of them is alive, in any process, the slot is not written to: a
  publisher takes another one, or raises if none is left;
- a publisher takes the smallest slot that fits; among slots of one size a free one, else that of the oldest version,
  which is then evicted (also if the publication fails later). Versions with dependents come after those without, and
  are evicted together with their dependents. Never evicted are the newest version, its dependency, and the dependency
  of the version to be published;
- no reader gets bytes whose digest differs from the manifest;
- the remains of a dead owner are removed when the next store is created on the machine.
"""

import fcntl
import mmap
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from rollart.backends.stores.shared_draft import Draft, layout
from rollart.backends.stores.shared_index import Held, Index
from rollart.ports.weight_rules import (
    check_dependency,
    check_index,
    check_newer,
    check_not_needed,
    checked_buckets,
    copy_bucket,
    not_held,
    sealed,
)
from rollart.types.digests import record_digest
from rollart.types.errors import DigestMismatch, RequestError, VersionMissing, WeightError
from rollart.types.versions import Version
from rollart.types.weights import Manifest, verify_bucket

ROOT = Path("/dev/shm")
PREFIX = "rollart-"
SHARED = mmap.MAP_SHARED | mmap.MAP_POPULATE
"""Populates all pages at once: faulting them in one by one makes a copy thirty times slower."""
MINIMUM_SLOTS = 2
"""One for the newest version, one for the next."""


class SharedMemoryStore:
    """Weight store in shared memory. Unpickling attaches to the same store. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        """Attach to an existing store; `create` makes one."""
        self._folder = folder
        self._owner: int | None = None
        self._owner_pid = os.getpid()
        self._manifests: dict[str, Manifest] = {}
        """The last manifest read, by its digest."""
        self._maps: dict[int, memoryview] = {}
        """Slots that this process has written to. Mapping a slot takes as long as a good part of filling it."""
        self._index()

    @classmethod
    def create(
        cls,
        name: str,
        *,
        slot_bytes: int,
        slots: int = 3,
        adapter_bytes: int = 0,
        root: Path = ROOT,
        ordered: bool = True,
    ) -> Self:
        """Create a store owned by this process; `slot_bytes` is the size of the largest version, with a margin.

        With `adapter_bytes`, there are as many additional slots of that size, so that adapters do not take the slots
        of full versions. Not `ordered`, it is a copy of another store: versions come in any order, also again.
        """
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
            raise RequestError(f"a shared store is named with letters, digits, '-', '_' and '.', not {name!r}")
        if slots < MINIMUM_SLOTS or slot_bytes < 1:
            raise RequestError(f"a shared store has {MINIMUM_SLOTS} slots or more of a byte or more, not {slots}")
        if not root.is_dir():
            raise RequestError(f"this machine has no shared memory at {root}; use a FolderStore")
        folder = root / (PREFIX + name)
        with _locked(root / f"{PREFIX}{os.getuid()}.lock"):
            _reclaim(root)
            try:
                folder.mkdir(mode=0o700)
            except FileExistsError as error:
                raise RequestError(
                    f"the shared store {name!r} in {root} belongs to another running process; choose another name"
                ) from error
            owner = _open(folder / "owner", os.O_RDWR | os.O_CREAT)
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        sizes = (slot_bytes,) * slots + ((adapter_bytes,) * slots if adapter_bytes else ())
        try:
            for slot, size in enumerate(sizes):
                _allocate(folder / f"slot-{slot}", size)
        except OSError as error:
            free = shutil.disk_usage(root).free
            shutil.rmtree(folder, ignore_errors=True)
            os.close(owner)
            raise RequestError(
                f"{slots} slots of {slot_bytes + adapter_bytes:,} bytes do not fit into {root}, which has {free:,} "
                f"free: {error}. "
                "Use fewer slots, or give the machine more shared memory."
            ) from error
        _replace(folder, Index(sizes, ordered=ordered))
        store = cls(folder)
        store._owner = owner
        return store

    def close(self) -> None:
        """Remove the store, if this process owns it; existing views stay valid. No effect in other processes."""
        self._maps.clear()
        owner, self._owner = self._owner, None
        if owner is not None and self._owner_pid == os.getpid():  # a forked child inherits the file, not the ownership
            # Renamed first, so that no process attaches to half a store.
            gone = self._folder.with_name(f".{self._folder.name}.{os.getpid()}.gone")
            with suppress(OSError):
                self._folder.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)
            os.close(owner)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[type[Self], tuple[Path]]:
        return type(self), (self._folder,)

    # --- the port

    def publish(self, manifest: Manifest, buckets: Iterable[bytes | memoryview]) -> None:
        with self.begin(manifest) as draft:
            for index, bucket in checked_buckets(manifest, buckets):
                copy_bucket(manifest, index, bucket, draft.place(index))
            draft.commit()

    def manifest(self, version: Version) -> Manifest:
        with self._lease(version) as (manifest, _, _):
            return manifest

    def bucket(self, version: Version, index: int) -> bytes | memoryview:
        """A read-only view of the slot; the version stays in place for as long as the view lives."""
        with self._lease(version) as (manifest, held, slot):
            check_index(manifest, index)
            places, end = layout(held.manifest_bytes, manifest)
            if os.fstat(slot).st_size < end:
                raise DigestMismatch(
                    f"{version} is truncated: its slot ends before {end:,} bytes. Publish the version again."
                )
            if not manifest.bucket_bytes[index]:
                return b""
            # The mapping keeps the slot's file open, and with it the lock of the lease.
            mapped = mmap.mmap(
                slot,
                manifest.bucket_bytes[index],
                flags=SHARED,
                prot=mmap.PROT_READ,
                offset=places[index],
            )
            view = memoryview(mapped)
            verify_bucket(manifest, index, view)
            return view

    def newest(self) -> Version | None:
        return max((held.version for held in self._index().held), default=None)

    def drop(self, version: Version) -> None:
        with _locked(self._folder / "index.lock"):
            index = self._index()
            if index.of(version) is not None:
                check_not_needed(version, index.dependencies())
                _replace(self._folder, index.without({version}))

    # --- publication in parts

    def begin(self, manifest: Manifest) -> Draft:
        """Take a slot for a version, whose buckets are then written to their places, and make it visible later."""
        data, digest = sealed(manifest)
        places, end = layout(len(data), manifest)
        check_newer(manifest.version, self._index().fence)
        lock, slot, evicted = self._free_slot(manifest, end)
        try:
            target = self._mapped(slot)
            target[: len(data)] = data
        except BaseException:
            os.close(lock)
            raise
        held = Held(manifest.version, slot, len(data), digest, manifest.depends_on)
        return Draft(manifest, slot, evicted, target, places, lock, lambda: self._commit(manifest, held))

    def place(self, manifest: Manifest, slot: int, index: int) -> memoryview:
        """Place of a bucket of a draft that another process has begun in this slot; writable."""
        places, _ = layout(len(sealed(manifest)[0]), manifest)
        return self._mapped(slot)[places[index] : places[index] + manifest.bucket_bytes[index]]

    @contextmanager
    def lend(self, version: Version, index: int) -> Iterator[memoryview]:
        """Bytes of a bucket while the block runs. Not verified: for a receiver that does that itself."""
        with self._lease(version) as (manifest, held, _):
            check_index(manifest, index)
            start = layout(held.manifest_bytes, manifest)[0][index]
            yield self._mapped(held.slot)[start : start + manifest.bucket_bytes[index]].toreadonly()

    def _commit(self, manifest: Manifest, held: Held) -> None:
        with _locked(self._folder / "index.lock"):
            index = self._index()
            check_newer(held.version, index.fence)
            check_dependency(manifest, index.dependencies())
            if index.of(held.version) is not None:
                raise WeightError(f"{held.version} is already in {self._folder.name}")
            _replace(self._folder, index.with_version(held))

    # --- slots

    @contextmanager
    def _lease(self, version: Version) -> Iterator[tuple[Manifest, Held, int]]:
        """Manifest of a version, its location, and its slot's open file, which is not written to meanwhile."""
        index = self._index()
        held = index.of(version)
        if held is None:
            raise not_held(version, (other.version for other in index.held))
        slot = _open(self._folder / f"slot-{held.slot}", os.O_RDONLY)
        try:
            locked = _try_lock(slot, fcntl.LOCK_SH)
            # A publisher removes a version from the index before it overwrites it: a version found now stays.
            index = self._index()
            if not locked or index.of(version) != held:
                raise not_held(version, (other.version for other in index.held if other.version != version))
            yield self._manifest(slot, held), held, slot
        finally:
            os.close(slot)

    def _manifest(self, slot: int, held: Held) -> Manifest:
        known = self._manifests.get(held.manifest_digest)
        if known is not None:
            return known
        data = os.pread(slot, held.manifest_bytes, 0)
        if record_digest(data) != held.manifest_digest:
            raise DigestMismatch(f"the manifest of {held.version} was damaged in {self._folder}; publish it again")
        manifest = msgspec.json.decode(data, type=Manifest)
        self._manifests = {held.manifest_digest: manifest}
        return manifest

    def _free_slot(self, manifest: Manifest, nbytes: int) -> tuple[int, int, set[Version]]:
        """A slot without readers, locked by the open file that is returned with it; its version is evicted."""
        with _locked(self._folder / "index.lock"):
            index = self._index()
            check_dependency(manifest, index.dependencies())
            if nbytes > max(index.slot_bytes):
                raise WeightError(
                    f"{manifest.version} takes {nbytes:,} bytes, but the slots of the shared store {self._folder.name} "
                    f"have {max(index.slot_bytes):,}. Nothing was published; create the store with larger slots."
                )
            lock, slot, evicted = self._claim(index, manifest, nbytes)
            if evicted:
                _replace(self._folder, index.without(evicted))
        return lock, slot, evicted

    def _claim(self, index: Index, manifest: Manifest, nbytes: int) -> tuple[int, int, set[Version]]:
        """Lock the best slot without readers and writers; returns its open file, its number, and what is evicted."""
        for slot, evicted in index.candidates(nbytes, manifest.depends_on):
            file = _open(self._folder / f"slot-{slot}", os.O_RDWR)
            if _try_lock(file, fcntl.LOCK_EX):
                return file, slot, evicted
            os.close(file)
        raise WeightError(
            f"no slot is free for {manifest.version}: of the {len(index.slot_bytes)} in {self._folder.name}, those "
            "large enough hold the newest version or its dependency, or are being read or written. Nothing was "
            "published; create the store with more slots, or let readers release their buckets."
        )

    def _mapped(self, slot: int) -> memoryview:
        if slot not in self._maps:
            # Not the file that is locked: a mapping keeps its file open, and with it the lock.
            file = _open(self._folder / f"slot-{slot}", os.O_RDWR)
            try:
                self._maps[slot] = memoryview(mmap.mmap(file, 0, flags=SHARED))
            finally:
                os.close(file)
        return self._maps[slot]

    def _index(self) -> Index:
        try:
            return msgspec.json.decode((self._folder / "index.json").read_bytes(), type=Index)
        except FileNotFoundError as error:
            raise _gone(self._folder) from error


def _allocate(path: Path, nbytes: int) -> None:
    """Allocate all memory now, so that a store that does not fit fails here and not during a publication."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(file, 0, nbytes)
    finally:
        os.close(file)


def _replace(folder: Path, index: Index) -> None:
    draft = folder / "index.draft"
    draft.write_bytes(msgspec.json.encode(index))
    draft.replace(folder / "index.json")


def _reclaim(root: Path) -> None:
    """Remove the stores of dead owners. Called under the creation lock, so no store is half created."""
    for folder in (*root.glob(f"{PREFIX}*/"), *root.glob(f".{PREFIX}*.gone/")):
        with suppress(OSError):  # another user's, or just removed
            owner = os.open(folder / "owner", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                if _try_lock(owner, fcntl.LOCK_EX):
                    shutil.rmtree(folder)
            finally:
                os.close(owner)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Exclusive lock of this path among processes and threads. Held briefly: nothing is copied under it."""
    file = _open(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def _open(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_CLOEXEC, 0o600)
    except FileNotFoundError as error:
        raise _gone(path.parent) from error


def _gone(folder: Path) -> VersionMissing:
    return VersionMissing(
        f"no shared store in {folder}: its owner closed it or has ended. Create one and publish again."
    )


def _try_lock(file: int, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
