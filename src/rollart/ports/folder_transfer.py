"""Folders of this machine as ends of a transfer: read in pieces, received whole and verified, shared by processes.

    <temporary folder>/rollart-<user>/<kind>/    per machine: what workers fetched or have yet to send

Invariants: a received folder gets its name when all of it is on disk and verified. Two processes that need the same
folder fetch it once, because the second waits for the lock of the first.
"""

import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rollart.ports.files import RunFiles
from rollart.types.digests import Data, bulk_digest_of
from rollart.types.errors import FilesError, FolderDamaged
from rollart.types.files import Entries, FileEntry

PIECE_BYTES = 8 << 20
LOCK, USE = ".lock", ".use"
DRAFT = ".tmp"


def check_name(name: str) -> str:
    """A single visible name: no path, so that nothing outside of a place can be reached.

    >>> check_name("../journal.sqlite")
    Traceback (most recent call last):
    rollart.types.errors.FilesError: '../journal.sqlite' is not the name of a file or folder of the run
    """
    if not name or name.startswith(".") or "/" in name or "\\" in name or "\0" in name:
        raise FilesError(f"{name!r} is not the name of a file or folder of the run")
    return name


def entries_of(folder: Path) -> Entries:
    """Files of a folder, with their digests. Subfolders and hidden files are left out: they do not travel."""
    return tuple(FileEntry(path.name, path.stat().st_size, bulk_digest_of(pieces(path))) for path in files_of(folder))


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))


def pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as file:
        while piece := file.read(PIECE_BYTES):
            yield piece


def receive(target: Path, entries: Entries, content: Callable[[FileEntry], Iterable[Data]]) -> None:
    """Make a folder of these files from their pieces; raises `FilesError` and leaves nothing if one is damaged."""
    draft = target.with_name(draft_name(target.name))
    try:
        draft.mkdir(parents=True)
        for entry in entries:
            with (draft / check_name(entry.name)).open("xb") as file:
                digest = bulk_digest_of(_written(file.write, content(entry)))
                file.flush()
                os.fsync(file.fileno())
            if digest != entry.digest:
                raise FolderDamaged(f"{entry.name} of {target.name} does not match its digest")
        publish(draft, target)
    except OSError as error:
        raise FilesError(f"cannot write {target}: {error}; free some space there") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def publish(draft: Path, target: Path) -> None:
    """Give a complete draft its name, durably."""
    sync_folder(draft)
    draft.rename(target)
    sync_folder(target.parent)


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def draft_name(folder: str) -> str:
    """A new name for a draft of this folder."""
    return f".{folder}.{secrets.token_hex(6)}{DRAFT}"


def drafts(root: Path, folder: str = "") -> list[Path]:
    """Drafts of a folder, by default of all folders."""
    beginning = f".{folder}." if folder else "."
    return [path for path in root.glob(f".*{DRAFT}") if path.name.startswith(beginning) and path.is_dir()]


def fetch(files: RunFiles, folder: str, target: Path) -> None:
    """Make `target` a copy of a folder, unless it already is; several processes may ask for it at the same time."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with locked(target):
        if target.is_dir():
            if entries_of(target) == files.contents(folder):
                return
            shutil.rmtree(target)
        for left in drafts(target.parent, target.name):  # of a process that was killed: it held the lock
            shutil.rmtree(left, ignore_errors=True)
        files.get(folder, target)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock beside a path; it is released when the process ends, however it ends."""
    handle = os.open(path.with_name(f".{path.name}{LOCK}"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


class Held:
    """A lock on a folder that others may share, held until `close` or the end of the process."""

    def __init__(self, folder: Path) -> None:
        self._handle: int | None = _lock_of(folder, fcntl.LOCK_SH)

    def close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def remove_unused(folder: Path) -> bool:
    """Delete a folder, and its locks, that no process holds; False if one does."""
    try:
        handle = _lock_of(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    try:
        shutil.rmtree(folder, ignore_errors=True)
        for lock in (LOCK, USE):  # last: until then nobody else can hold the folder
            folder.with_name(f".{folder.name}{lock}").unlink(missing_ok=True)
    finally:
        os.close(handle)
    return True


def _lock_of(folder: Path, kind: int) -> int:
    """Handle of the lock that says who uses a folder."""
    path = folder.with_name(f".{folder.name}{USE}")
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, kind)
            if path.exists() and os.fstat(handle).st_ino == path.stat().st_ino:
                return handle
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # it was removed with its folder before it was locked


def node_folder(kind: str) -> Path:
    """Folder of this user on this machine for one kind of files; nobody else can read it."""
    root = Path(tempfile.gettempdir()) / f"rollart-{os.getuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    if root.is_symlink() or root.stat().st_uid != os.getuid():
        raise FilesError(f"{root} belongs to another user; remove it, or set TMPDIR to a folder of your own")
    folder = root / kind
    folder.mkdir(exist_ok=True)
    return folder


def _written(write: Callable[[Data], object], chunks: Iterable[Data]) -> Iterator[Data]:
    for chunk in chunks:
        write(chunk)
        yield chunk
