"""A weight store in a folder, which may be shared between machines (NFS).

    <root>/step-00000012.epoch-0/           v0.12
        bucket-00000.safetensors, …         one file per bucket, also readable by other tools
        manifest.json                       the manifest and its digest
    <root>/.step-00000013.epoch-0.….tmp/    being written or being removed; never read
    <root>/fence.json                       the newest version that was removed: later versions must be newer than it

Invariants:
- a folder gets its name only when all of it is on disk, and loses its name before any of it is removed, so that a
  version is visible completely or not at all, whichever process is killed;
- a version is held together with its dependency (the full version under an adapter): of two that are removed, the
  adapter goes first;
- versions only grow, whichever processes publish, also past those that were dropped;
- a failed publication, for example on a full disk, leaves nothing behind except drafts that the next one removes;
- no reader gets bytes whose digest differs from the manifest; only JSON and safetensors are read.

A machine may cache the absence of a file for as long as its mount allows: mount NFS with `lookupcache=positive` if
engines look for versions before they are published.
"""

import errno
import fcntl
import logging
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from rollart.backends.stores.wrapping import LENGTH_BYTES, data_start, header
from rollart.ports.weight_rules import (
    Dependencies,
    check_dependency,
    check_index,
    check_newer,
    check_not_needed,
    checked_buckets,
    not_held,
    sealed,
    with_dependencies,
)
from rollart.types.digests import record_digest
from rollart.types.errors import DigestMismatch, RequestError, VersionMissing, WeightError
from rollart.types.versions import Version
from rollart.types.weights import Manifest, verify_bucket

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
FENCE = "fence.json"
_NAME = re.compile(r"step-(\d{8,})\.epoch-(\d+)")
_DRAFT = re.compile(rf"\.{_NAME.pattern}\.[0-9a-f]+\.tmp")


class _Sealed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of `manifest.json`; `digest` is that of the bytes of `manifest`."""

    digest: str
    manifest: msgspec.Raw


def write_file(path: Path, parts: Sequence[bytes | memoryview]) -> None:
    """Write a new file; it is on disk when this returns."""
    with path.open("xb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())


class FolderStore:
    """Weight store in a folder. Picklable: every copy uses the same folder. A publication evicts all but the newest
    `keep` versions and their dependencies.

    `write` puts one file on disk; tests make it fail.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        keep: int = 3,
        write: Callable[[Path, Sequence[bytes | memoryview]], None] = write_file,
    ) -> None:
        if keep < 1:
            raise RequestError(f"a folder store keeps 1 version or more, not {keep}")
        self._root = Path(root)
        self._keep = keep
        self._write = write

    # --- the port

    def publish(self, manifest: Manifest, buckets: Iterable[bytes | memoryview]) -> None:
        version = manifest.version
        draft = self._draft(version)
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            check_newer(version, self._fence())
            check_dependency(manifest, self._held())
            self._clear_drafts(version)
            try:
                draft.mkdir()
                self._fill(draft, manifest, buckets)
                with self._locked():
                    check_newer(version, self._fence())
                    check_dependency(manifest, self._held())
                    self._commit(draft, self._folder(version))
            finally:
                shutil.rmtree(draft, ignore_errors=True)
        except OSError as error:
            raise WeightError(self._not_written(manifest, error)) from error
        self._evict(version)

    def manifest(self, version: Version) -> Manifest:
        data = self._read(version, MANIFEST, lambda path: path.read_bytes())
        try:
            whole = msgspec.json.decode(data, type=_Sealed)
            if record_digest(bytes(whole.manifest)) == whole.digest:
                return msgspec.json.decode(whole.manifest, type=Manifest)
        except (msgspec.DecodeError, UnicodeDecodeError):
            pass
        raise DigestMismatch(f"the manifest of {version} in {self._root} was cut or damaged; publish the version again")

    def bucket(self, version: Version, index: int) -> bytes:
        manifest = self.manifest(version)
        check_index(manifest, index)
        data = self._read(version, _file_name(index), _bucket_bytes)
        verify_bucket(manifest, index, data)
        return data

    def newest(self) -> Version | None:
        return max(self._held(), default=None)

    def drop(self, version: Version) -> None:
        folder, draft = self._folder(version), self._draft(version)
        if not folder.is_dir():
            return
        try:
            with self._locked():
                check_not_needed(version, self._dependencies())
                if version == self.newest():
                    self._raise_fence(version)
                with suppress(FileNotFoundError):  # dropped by another process meanwhile
                    folder.rename(draft)
        except OSError as error:
            raise WeightError(f"{version} could not be dropped from {self._root}: {error}") from error
        shutil.rmtree(draft, ignore_errors=True)

    # --- writing

    def _fill(self, draft: Path, manifest: Manifest, buckets: Iterable[bytes | memoryview]) -> None:
        for index, view in checked_buckets(manifest, buckets):
            path = draft / _file_name(index)
            self._write(path, (header(manifest, index), view))
            # After writing, to detect a publisher that changes its buffer meanwhile.
            verify_bucket(manifest, index, view)
        data, digest = sealed(manifest)
        self._write(draft / MANIFEST, (msgspec.json.encode(_Sealed(digest, msgspec.Raw(data))),))
        _sync_folder(draft)

    def _commit(self, draft: Path, folder: Path) -> None:
        draft.rename(folder)
        try:
            _sync_folder(self._root)
        except OSError:
            folder.rename(draft)
            raise

    def _evict(self, version: Version) -> None:
        """Evict all but the newest `keep` versions and their dependencies; dependents before their dependencies."""
        held = self._dependencies()
        kept = with_dependencies(sorted(held)[-self._keep :], held)
        for old in sorted(held.keys() - kept, reverse=True):
            try:
                self.drop(old)
            except WeightError as error:
                logger.warning("%s is published, but an old version stays: %s", version, error)

    def _clear_drafts(self, version: Version) -> None:
        """Remove what killed publishers left. A draft of a newer version is a successor's work and stays.

        Renamed first, so that a publisher that is still alive cannot commit a draft that is being removed.
        """
        for path in self._root.iterdir():
            match = _DRAFT.fullmatch(path.name)
            if match and _version(match) <= version:
                gone = self._draft(_version(match))
                with suppress(FileNotFoundError):
                    path.rename(gone)
                shutil.rmtree(gone, ignore_errors=True)

    def _fence(self) -> Version | None:
        """Newest version ever published."""
        try:
            removed = [msgspec.json.decode((self._root / FENCE).read_bytes(), type=Version)]
        except FileNotFoundError:
            removed = []
        except msgspec.DecodeError as error:
            raise WeightError(
                f"{self._root / FENCE} is damaged ({error}), so that it is unknown which versions were published. "
                "Write the newest as [epoch, step] into it, or use an empty folder."
            ) from error
        return max((*self._held(), *removed), default=None)

    def _raise_fence(self, version: Version) -> None:
        """Record that the newest version was published, before it is removed."""
        path = self._root / FENCE
        if path.exists() and msgspec.json.decode(path.read_bytes(), type=Version) >= version:
            return
        draft = self._root / f".{FENCE}.{uuid.uuid4().hex}"
        try:
            write_file(draft, (msgspec.json.encode(version),))
            draft.replace(self._root / FENCE)
        finally:
            draft.unlink(missing_ok=True)
        _sync_folder(self._root)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Exclusive lock against all publishers and droppers. Held briefly: nothing large is written under it."""
        file = os.open(self._root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            os.close(file)

    def _not_written(self, manifest: Manifest, error: OSError) -> str:
        what = f"{manifest.version} could not be written to {self._root}: {error}. Nothing was published. "
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            free = shutil.disk_usage(next(path for path in (self._root, *self._root.parents) if path.exists())).free
            return what + (
                f"It takes {manifest.total_bytes:,} bytes and the disk has {free:,} free, perhaps fewer for this user; "
                "free space, keep fewer versions, or use another folder."
            )
        return what + "Check that every machine can write there and that its mount supports locks."

    # --- reading

    def _read(self, version: Version, name: str, read: Callable[[Path], bytes]) -> bytes:
        try:
            return read(self._folder(version) / name)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
                raise WeightError(f"{version} cannot be read from {self._root}: {error}") from error
            held = self._held()
            if version in held:
                raise VersionMissing(f"{version} in {self._root} lacks {name}; publish the version again") from error
            raise not_held(version, held) from error

    def _held(self) -> list[Version]:
        if not self._root.is_dir():
            return []
        return sorted(_version(match) for path in self._root.iterdir() if (match := _NAME.fullmatch(path.name)))

    def _dependencies(self) -> Dependencies:
        """Dependencies of all versions. One with an unreadable manifest is never served and depends on nothing."""
        found: dict[Version, Version | None] = {}
        for version in self._held():
            try:
                found[version] = self.manifest(version).depends_on
            except WeightError:
                found[version] = None
        return found

    def _folder(self, version: Version) -> Path:
        return self._root / f"step-{version.step:08}.epoch-{version.epoch}"

    def _draft(self, version: Version) -> Path:
        """A new name each time, so that no two publishers write to the same draft."""
        return self._root / f".{self._folder(version).name}.{uuid.uuid4().hex}.tmp"


def _version(match: re.Match[str]) -> Version:
    return Version(epoch=int(match[2]), step=int(match[1]))


def _file_name(index: int) -> str:
    return f"bucket-{index:05}.safetensors"


def _bucket_bytes(path: Path) -> bytes:
    """Bytes after the header; empty if the file ends before. The caller verifies the digest."""
    with path.open("rb") as file:
        start = data_start(file.read(LENGTH_BYTES))
        if start > os.fstat(file.fileno()).st_size:
            return b""
        file.seek(start)
        return file.read()


def _sync_folder(folder: Path) -> None:
    """Sync the names in a folder to disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
