"""A weight store in the shared memory of one machine: a fixed number of version slots, allocated beforehand.

    /dev/shm/rollart-<name>/
        owner             locked by the process that created the store, for as long as it lives
        index.json        which version lies in which slot; replaced as a whole, under the lock of `index.lock`
        slot-0, slot-1…   each: the manifest, then its buckets, every part from a page boundary on

Files and their locks rather than `multiprocessing.shared_memory`, whose resource tracker removes segments that other
processes still use: the kernel gives up a lock with the process that held it, so that a crash leaves nothing locked.

What holds:
- a version is in the index, all of it copied and verified, or it is not: a publisher killed anywhere leaves the
  versions before it whole, and its slot free;
- versions only grow, whichever processes publish, also past those that were dropped;
- a reader's views are the slot itself. While one of them is alive, in whatever process, the slot is not written to: a
  publisher takes another one, the oldest version's if need be (which is then gone, also when the publication fails)
  and never the newest's, or says that none is left;
- no reader gets bytes whose digest is not that of the manifest;
- what a dead owner left behind goes when the next store is created on the machine.
"""

import fcntl
import mmap
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from rollart.backends.stores.rules import check_counts, check_index, check_newer, manifest_digest, not_held, sealed
from rollart.types.errors import DigestMismatch, RequestError, VersionMissing, WeightError
from rollart.types.versions import Version
from rollart.types.weights import Manifest, verify_bucket

ROOT = Path("/dev/shm")
PREFIX = "rollart-"
SHARED = mmap.MAP_SHARED | mmap.MAP_POPULATE
"""All pages at once: faulting them in one by one makes a copy thirty times slower."""
MINIMUM_SLOTS = 2
"""One for the newest version, one for the next."""


class _Held(msgspec.Struct, frozen=True):
    """A version in a slot."""

    version: Version
    slot: int
    manifest_bytes: int
    manifest_digest: str


class _Index(msgspec.Struct, frozen=True):
    """The commit record. `fence` is the newest version ever published."""

    slots: int
    slot_bytes: int
    fence: Version | None = None
    held: tuple[_Held, ...] = ()

    def of(self, version: Version) -> _Held | None:
        return next((held for held in self.held if held.version == version), None)

    def without(self, version: Version) -> "_Index":
        return msgspec.structs.replace(self, held=tuple(held for held in self.held if held.version != version))

    def order(self) -> list[int]:
        """Slots to publish into, the one that costs least first: free ones, then by age; never the newest version's."""
        by_age = sorted(self.held, key=lambda held: held.version)
        taken = [held.slot for held in by_age]
        return [slot for slot in range(self.slots) if slot not in taken] + taken[:-1]


class SharedMemoryStore:
    """Pickled by its place: whoever unpickles it is attached to the same store. Any thread may call it."""

    def __init__(self, folder: Path) -> None:
        """Attach to a store that exists; `create` makes one."""
        self._folder = folder
        self._owner: int | None = None
        self._owner_pid = os.getpid()
        self._manifests: dict[str, Manifest] = {}
        """The manifest read last, by its digest."""
        self._index()

    @classmethod
    def create(cls, name: str, *, slot_bytes: int, slots: int = 3, root: Path = ROOT) -> Self:
        """A new store that this process owns; `slot_bytes` is the size of the largest version, with some room."""
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
            raise RequestError(f"a shared store is named with letters, digits, '-', '_' and '.', not {name!r}")
        if slots < MINIMUM_SLOTS or slot_bytes < 1:
            raise RequestError(f"a shared store has {MINIMUM_SLOTS} slots or more of a byte or more, not {slots}")
        if not root.is_dir():
            raise RequestError(f"there is no shared memory at {root} on this machine; use a FolderStore")
        folder = root / (PREFIX + name)
        with _locked(root / f"{PREFIX}{os.getuid()}.lock"):
            _reclaim(root)
            try:
                folder.mkdir(mode=0o700)
            except FileExistsError as error:
                raise RequestError(
                    f"the shared store {name!r} in {root} belongs to another process that runs; choose another name"
                ) from error
            owner = _open(folder / "owner", os.O_RDWR | os.O_CREAT)
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            for slot in range(slots):
                _allocate(folder / f"slot-{slot}", slot_bytes)
        except OSError as error:
            free = shutil.disk_usage(root).free
            shutil.rmtree(folder, ignore_errors=True)
            os.close(owner)
            raise RequestError(
                f"{slots} slots of {slot_bytes:,} bytes do not fit into {root}, which has {free:,} free: {error}. "
                "Use fewer slots, or give the machine more shared memory."
            ) from error
        _replace(folder, _Index(slots, slot_bytes))
        store = cls(folder)
        store._owner = owner
        return store

    def close(self) -> None:
        """The owner removes the store; views that were handed out stay as they are. For the others nothing is to do."""
        owner, self._owner = self._owner, None
        if owner is not None and self._owner_pid == os.getpid():  # a forked child has the number, but is not the owner
            # Its name first, so that nobody attaches to half a store.
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

    def publish(self, manifest: Manifest, buckets: Sequence[bytes | memoryview]) -> None:
        check_counts(manifest, buckets)
        version = manifest.version
        data, digest = sealed(manifest)
        places, end = _layout(len(data), manifest)
        check_newer(version, self._index().fence)
        with self._free_slot(version, end) as slot:
            # Verified after the copy: what the publisher does with its buffers meanwhile is seen, afterwards it is not.
            with self._mapped(slot, end) as target:
                target[: len(data)] = data
                for index, (start, bucket) in enumerate(zip(places, buckets, strict=True)):
                    with target[start : start + manifest.bucket_bytes[index]] as place:
                        place[:] = memoryview(bucket).cast("B")
                        verify_bucket(manifest, index, place)
            with _locked(self._folder / "index.lock"):
                now = self._index()
                check_newer(version, now.fence)
                held = (*now.held, _Held(version, slot, len(data), digest))
                _replace(self._folder, msgspec.structs.replace(now, fence=version, held=held))

    def manifest(self, version: Version) -> Manifest:
        with self._lease(version) as (manifest, _, _):
            return manifest

    def bucket(self, version: Version, index: int) -> bytes | memoryview:
        """A view of the slot, read-only: the version stays where it is for as long as the view lives."""
        with self._lease(version) as (manifest, held, slot):
            check_index(manifest, index)
            places, end = _layout(held.manifest_bytes, manifest)
            if os.fstat(slot).st_size < end:
                raise DigestMismatch(
                    f"{version} is cut: its slot ends before {end:,} bytes. Publish the version again."
                )
            if not manifest.bucket_bytes[index]:
                return b""
            # The mapping keeps the slot's file open, and with it the lock that the lease took.
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
                _replace(self._folder, index.without(version))

    # --- slots

    @contextmanager
    def _lease(self, version: Version) -> Iterator[tuple[Manifest, _Held, int]]:
        """The manifest of a version, where it lies, and its slot's open file, which nobody writes to meanwhile."""
        index = self._index()
        held = index.of(version)
        if held is None:
            raise not_held(version, (other.version for other in index.held))
        slot = _open(self._folder / f"slot-{held.slot}", os.O_RDONLY)
        try:
            locked = _try_lock(slot, fcntl.LOCK_SH)
            # A publisher takes a version out of the index before it writes over it: what is there now, stays.
            index = self._index()
            if not locked or index.of(version) != held:
                raise not_held(version, (other.version for other in index.held if other.version != version))
            yield self._manifest(slot, held), held, slot
        finally:
            os.close(slot)

    def _manifest(self, slot: int, held: _Held) -> Manifest:
        known = self._manifests.get(held.manifest_digest)
        if known is not None:
            return known
        data = os.pread(slot, held.manifest_bytes, 0)
        if manifest_digest(data) != held.manifest_digest:
            raise DigestMismatch(f"the manifest of {held.version} was damaged in {self._folder}; publish it again")
        manifest = msgspec.json.decode(data, type=Manifest)
        self._manifests = {held.manifest_digest: manifest}
        return manifest

    @contextmanager
    def _free_slot(self, version: Version, needed: int) -> Iterator[int]:
        """A slot that no reader sees, the oldest version's if all are taken, and nobody else's until this is left."""
        with _locked(self._folder / "index.lock"):
            index = self._index()
            if needed > index.slot_bytes:
                raise WeightError(
                    f"{version} takes {needed:,} bytes, but the slots of the shared store {self._folder.name} have "
                    f"{index.slot_bytes:,}. Nothing was published; create the store with larger slots."
                )
            file, slot = self._claim(index, version)
            evicted = next((held.version for held in index.held if held.slot == slot), None)
            if evicted is not None:
                _replace(self._folder, index.without(evicted))
        try:
            yield slot
        finally:
            os.close(file)

    def _claim(self, index: _Index, version: Version) -> tuple[int, int]:
        """The first slot, by cost, that nobody reads or writes: its open file, locked, and its number."""
        for slot in index.order():
            file = _open(self._folder / f"slot-{slot}", os.O_RDWR)
            if _try_lock(file, fcntl.LOCK_EX):
                return file, slot
            os.close(file)
        raise WeightError(
            f"{version} finds no slot: of the {index.slots} in {self._folder.name} one holds the newest version and "
            "the others are being read or written. Nothing was published; create the store with more slots, or let "
            "readers release their buckets."
        )

    @contextmanager
    def _mapped(self, slot: int, length: int) -> Iterator[memoryview]:
        with (
            (self._folder / f"slot-{slot}").open("r+b") as file,
            mmap.mmap(file.fileno(), length, flags=SHARED) as mapped,
            memoryview(mapped) as view,
        ):
            yield view

    def _index(self) -> _Index:
        try:
            return msgspec.json.decode((self._folder / "index.json").read_bytes(), type=_Index)
        except FileNotFoundError as error:
            raise _gone(self._folder) from error


def _layout(manifest_bytes: int, manifest: Manifest) -> tuple[list[int], int]:
    """Where each bucket starts, and where the last one ends."""
    places = []
    end = manifest_bytes
    for nbytes in manifest.bucket_bytes:
        start = -(-end // mmap.PAGESIZE) * mmap.PAGESIZE
        places.append(start)
        end = start + nbytes
    return places, end


def _allocate(path: Path, nbytes: int) -> None:
    """All of its memory now: a store that does not fit fails here, and not in the middle of a publication."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(file, 0, nbytes)
    finally:
        os.close(file)


def _replace(folder: Path, index: _Index) -> None:
    draft = folder / "index.draft"
    draft.write_bytes(msgspec.json.encode(index))
    draft.replace(folder / "index.json")


def _reclaim(root: Path) -> None:
    """Remove the stores of owners that are dead. Called under the lock that creating takes: none is half there."""
    for folder in (*root.glob(f"{PREFIX}*/"), *root.glob(f".{PREFIX}*.gone/")):
        with suppress(OSError):  # another user's, or gone meanwhile
            owner = os.open(folder / "owner", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                if _try_lock(owner, fcntl.LOCK_EX):
                    shutil.rmtree(folder)
            finally:
                os.close(owner)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Alone among all processes and threads that lock this path. Held for short: nothing is copied under it."""
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
        f"there is no shared store in {folder}: its owner closed it or has ended. Create one and publish again."
    )


def _try_lock(file: int, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
