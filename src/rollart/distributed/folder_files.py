"""`RunFiles` in a folder, and the receiving end for senders on other machines.

    begin(folder) ─► draft    write(draft, name, offset, piece, digest) …    commit(draft, folder, entries)

Invariants: nothing outside of the folder is reached, since names are single and links that lead out are refused. A
piece is verified when it is written, a file when its folder is committed. A new `begin` of a folder discards its
earlier drafts: a sender that was replaced cannot commit. Every call can be repeated, as after a lost answer.
"""

import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path

from rollart.ports.folder_transfer import (
    DRAFT,
    PIECE_BYTES,
    check_name,
    draft_name,
    drafts,
    entries_of,
    files_of,
    pieces,
    publish,
    receive,
)
from rollart.types.digests import bulk_digest
from rollart.types.errors import FilesError, FolderMissing
from rollart.types.files import Entries, FileEntry


class _Readable(ABC):
    """Folders of this machine that are read in pieces."""

    @abstractmethod
    def contents(self, folder: str) -> Entries: ...

    @abstractmethod
    def _held(self, folder: str) -> Path:
        """Path of a folder; raises `FolderMissing`."""

    def get(self, folder: str, target: Path) -> None:
        receive(target, self.contents(folder), lambda entry: self._pieces(folder, entry))

    def read(self, folder: str, name: str, offset: int) -> tuple[bytes, str]:
        """One piece of a file, and its digest."""
        path = self._held(folder) / check_name(name)
        try:
            with path.open("rb", buffering=0) as file:
                piece = os.pread(file.fileno(), PIECE_BYTES, offset)
        except OSError as error:
            raise FilesError(f"cannot read {path}: {error}") from error
        return piece, bulk_digest(piece)

    def _pieces(self, folder: str, entry: FileEntry) -> Iterator[bytes]:
        for offset in range(0, entry.nbytes, PIECE_BYTES):
            yield self.read(folder, entry.name, offset)[0]


class FolderFiles(_Readable):
    """Folders below one root, which is created when it is first written to."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def folders(self) -> list[str]:
        if not self._root.is_dir():
            return []
        return sorted(path.name for path in self._root.iterdir() if path.is_dir() and not path.name.startswith("."))

    def contents(self, folder: str) -> Entries:
        try:
            return entries_of(self._held(folder))
        except OSError as error:
            raise FilesError(f"cannot read {self._root / folder}: {error}") from error

    def put(self, source: Path, folder: str) -> None:
        entries, draft = entries_of(source), self.begin(folder)
        try:
            for entry in entries:
                offset = 0
                for piece in pieces(source / entry.name):
                    self.write(draft, entry.name, offset, piece, bulk_digest(piece))
                    offset += len(piece)
            self.commit(draft, folder, entries)
        except BaseException:
            self.abandon(draft)
            raise

    def delete(self, folder: str) -> None:
        draft = self._root / draft_name(check_name(folder))
        try:
            self._path(folder).rename(draft)
        except FileNotFoundError:
            return
        shutil.rmtree(draft, ignore_errors=True)

    def discard_drafts(self) -> None:
        for draft in drafts(self._root):
            shutil.rmtree(draft, ignore_errors=True)

    # --- pieces

    def begin(self, folder: str) -> str:
        """Open a draft of this folder; earlier ones are discarded."""
        self._path(folder)
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            for left in drafts(self._root, folder):
                shutil.rmtree(left, ignore_errors=True)
            name = draft_name(folder)
            (self._root / name).mkdir()
        except OSError as error:
            raise FilesError(f"cannot write to {self._root}: {error}; free some space there") from error
        return name

    def write(self, draft: str, name: str, offset: int, piece: bytes, digest: str) -> None:
        """Write one piece of a file of a draft."""
        if bulk_digest(piece) != digest:
            raise FilesError(f"a piece of {name} arrived damaged; send it again")
        path = self._draft(draft) / check_name(name)
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
            try:
                written = 0
                while written < len(piece):
                    written += os.pwrite(handle, memoryview(piece)[written:], offset + written)
            finally:
                os.close(handle)
        except OSError as error:
            raise FilesError(f"cannot write {path}: {error}; free some space there") from error

    def commit(self, draft: str, folder: str, entries: Entries) -> None:
        """Verify the whole draft and give it its name."""
        target = self._path(folder)
        try:
            if target.is_dir():
                if entries_of(target) != entries:
                    raise FilesError(f"{target} is already there, with other contents; it is not overwritten")
                self.abandon(draft)
                return
            path = self._draft(draft)
            for entry in entries:
                (path / check_name(entry.name)).touch()  # an empty one has no pieces
            if entries_of(path) != entries:
                raise FilesError(f"{folder} arrived damaged or incomplete; send it again")
            for file in files_of(path):
                _sync(file)
            publish(path, target)
        except OSError as error:
            raise FilesError(f"cannot write {target}: {error}; free some space there") from error

    def abandon(self, draft: str) -> None:
        """Discard a draft."""
        if _is_draft(draft):
            shutil.rmtree(self._root / draft, ignore_errors=True)

    def _path(self, folder: str) -> Path:
        path = self._root / check_name(folder)
        if path.is_symlink():
            raise FilesError(f"{path} is a link; only folders below {self._root} are read and written")
        return path

    def _held(self, folder: str) -> Path:
        path = self._path(folder)
        if not path.is_dir():
            raise FolderMissing(f"{self._root} has no complete {folder}")
        links = [file.name for file in files_of(path) if file.is_symlink()]
        if links:
            raise FilesError(f"{links[0]} of {path} is a link; only files below {self._root} are read")
        return path

    def _draft(self, draft: str) -> Path:
        path = self._root / draft
        if not _is_draft(draft) or not path.is_dir():
            raise FilesError(f"the transfer {draft!r} is over: a newer one replaced it. Begin again.")
        return path


class NamedFolders(_Readable):
    """Folders anywhere on this machine, under a name each, for reading only.

    Their entries are given, so that large ones are hashed once. Files may be links, as in the cache of Hugging Face.
    """

    def __init__(self, folders: Mapping[str, tuple[Path, Entries]]) -> None:
        self._paths = {check_name(name): path for name, (path, _) in folders.items()}
        self._entries = {name: entries for name, (_, entries) in folders.items()}

    def folders(self) -> list[str]:
        return sorted(self._paths)

    def contents(self, folder: str) -> Entries:
        self._held(folder)
        return self._entries[folder]

    def _held(self, folder: str) -> Path:
        if folder not in self._paths:
            raise FolderMissing(f"no folder travels under the name {folder!r}")
        return self._paths[folder]


def _is_draft(name: str) -> bool:
    return name.startswith(".") and name.endswith(DRAFT) and "/" not in name and "\0" not in name


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
