"""`RunFiles` at an fsspec URL: an object store, a file system over the network, or memory.

    <url>/<folder>/<files>
    <url>/<folder>/files.json    names, sizes and digests; written last, so a folder without it is a draft

Object stores cannot rename folders, so completeness is this one file, which appears whole or not at all. What was
written is read back and verified before it.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from rollart.ports.folder_transfer import PIECE_BYTES, check_name, entries_of, pieces, receive
from rollart.types.digests import bulk_digest_of
from rollart.types.errors import FilesError, FolderMissing, RequestError
from rollart.types.files import Entries, FileEntry

LIST = "files.json"


class FsspecFiles:
    """One place at a URL. Credentials are those of the process, as fsspec finds them."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._system()  # a missing package is reported by the controller, before a worker starts

    def __str__(self) -> str:
        return self._url

    def folders(self) -> list[str]:
        with _explained(self._url):
            return [name for name in self._names() if self._entries(name) is not None]

    def contents(self, folder: str) -> Entries:
        with _explained(self._url):
            return self._listed(folder)

    def put(self, source: Path, folder: str) -> None:
        with _explained(self._url):
            entries = entries_of(source)
            there = self._entries(folder)
            if there == entries:
                return
            if there is not None:
                raise FilesError(f"{self._url}/{folder} is already there, with other contents; it is not overwritten")
            self._clear(folder)
            for entry in entries:
                self._send(source / entry.name, folder, entry)
            self._write(folder, LIST, iter([msgspec.json.encode(entries)]))

    def get(self, folder: str, target: Path) -> None:
        with _explained(self._url):
            receive(target, self._listed(folder), lambda entry: self._read(folder, entry.name))

    def delete(self, folder: str) -> None:
        with _explained(self._url):
            if self._entries(folder) is not None:
                system, root = self._system()
                system.rm_file(f"{root}/{folder}/{LIST}")
            self._clear(folder)

    def discard_drafts(self) -> None:
        with _explained(self._url):
            for name in self._names():
                if self._entries(name) is None:
                    self._clear(name)

    def _send(self, path: Path, folder: str, entry: FileEntry) -> None:
        if entry.name == LIST:
            raise FilesError(f"{path}: a file with this name cannot be stored at a URL; rename it")
        self._write(folder, entry.name, pieces(path))
        if bulk_digest_of(self._read(folder, entry.name)) != entry.digest:
            raise FilesError(f"{self._url}/{folder}/{entry.name} differs from what was written; send it again")

    def _write(self, folder: str, name: str, content: Iterator[bytes]) -> None:
        system, root = self._system()
        system.makedirs(f"{root}/{folder}", exist_ok=True)
        with system.open(f"{root}/{folder}/{name}", "wb") as file:
            for piece in content:
                file.write(piece)

    def _read(self, folder: str, name: str) -> Iterator[bytes]:
        system, root = self._system()
        with system.open(f"{root}/{folder}/{check_name(name)}", "rb") as file:
            while piece := file.read(PIECE_BYTES):
                yield piece

    def _listed(self, folder: str) -> Entries:
        entries = self._entries(folder)
        if entries is None:
            raise FolderMissing(f"{self._url} has no complete {folder}")
        return entries

    def _entries(self, folder: str) -> Entries | None:
        """Entries of a folder; None for a draft. A partial list, as some file systems show, counts as a draft."""
        check_name(folder)
        self._system()[0].invalidate_cache()
        try:
            return msgspec.json.decode(b"".join(self._read(folder, LIST)), type=Entries)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None

    def _names(self) -> list[str]:
        system, root = self._system()
        system.invalidate_cache()
        try:
            found = system.ls(root, detail=True)
        except FileNotFoundError:
            return []
        names = [str(each["name"]).rstrip("/").rpartition("/")[2] for each in found if each["type"] == "directory"]
        return sorted(name for name in names if not name.startswith("."))

    def _clear(self, folder: str) -> None:
        system, root = self._system()
        path = f"{root}/{check_name(folder)}"
        if system.exists(path):
            system.rm(path, recursive=True)

    def _system(self) -> tuple[Any, str]:
        try:
            import fsspec  # late: only runs that name a URL need it
        except ImportError as error:
            raise RequestError(f"{self._url} needs fsspec; install it with: pip install fsspec") from error
        try:
            system, root = fsspec.core.url_to_fs(self._url)
        except (ImportError, ValueError) as error:
            raise RequestError(f"{self._url} cannot be opened: {error}") from error
        return system, str(root).rstrip("/")


class _explained:  # noqa: N801 - reads as a statement
    """Errors of a file system as `FilesError`, which names the URL."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _traceback: object) -> None:
        # Object stores raise errors of their own packages, most of them not OSErrors.
        if isinstance(error, Exception) and not isinstance(error, FilesError | RequestError):
            raise FilesError(f"{self._url}: {type(error).__name__}: {error}") from error
