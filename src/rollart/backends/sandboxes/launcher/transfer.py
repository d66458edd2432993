"""Files in and out of a sandbox, by a process that has entered it and become its user.

So a path means what it means inside: links lead nowhere else, and permissions are those of the sandbox's user. Opening
never blocks, and only regular files are read or written.
"""

import os
import shutil
import stat
import tarfile
from collections.abc import Callable
from typing import IO, Any

CHUNK = 2**18
EACH_MODE = 0o777
MAX_DEPTH = 200
MAX_PATH_BYTES = 3000
"""Limits of a path below the copied folder, which later code may walk recursively and pass to system calls."""


class Unreasonable(OSError):
    """A tree that only somebody makes who wants copying it to fail."""


def open_to_read(path: str) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    return _regular(descriptor, path)


def write(path: str, source: int, *, executable: bool) -> None:
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    descriptor = _regular(os.open(path, flags, 0o666), path)
    with open(descriptor, "wb", buffering=0) as file, open(source, "rb", buffering=0, closefd=False) as content:
        file.truncate(0)
        while chunk := content.read(CHUNK):
            view = memoryview(chunk)
            while view:
                view = view[file.write(view) :]
        if executable:
            os.fchmod(descriptor, 0o755)


def _regular(descriptor: int, path: str) -> int:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a regular file")
    return descriptor


def pack(folder: str, target: IO[bytes]) -> None:
    """Regular files and folders below a folder, as a tar stream."""
    with tarfile.open(fileobj=target, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        _pack(folder, "", archive)


def _pack(folder: str, inside: str, archive: tarfile.TarFile) -> None:
    with os.scandir(folder) as listing:
        entries = sorted(listing, key=lambda entry: entry.name)
    for entry in entries:
        name = f"{inside}{entry.name}"
        check_path(name)
        member = tarfile.TarInfo(name)
        if entry.is_dir(follow_symlinks=False):
            member.type, member.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(member)
            _pack(entry.path, f"{name}/", archive)
        elif entry.is_file(follow_symlinks=False):
            flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(_regular(os.open(entry.path, flags), entry.path), "rb") as file:
                about = os.fstat(file.fileno())
                member.size, member.mode = about.st_size, about.st_mode & EACH_MODE
                archive.addfile(member, file)


def check_path(inside: str) -> None:
    """
    >>> check_path("a/" * 200)
    Traceback (most recent call last):
    rollart.backends.sandboxes.launcher.transfer.Unreasonable: folders are nested more than 200 deep
    """
    if inside.count("/") >= MAX_DEPTH:
        raise Unreasonable(f"folders are nested more than {MAX_DEPTH} deep")
    if len(os.fsencode(inside)) > MAX_PATH_BYTES:
        raise Unreasonable(f"a path has more than {MAX_PATH_BYTES} bytes")


def check_tree(folder: str) -> None:
    """Raise `Unreasonable` unless all paths below a folder can be copied."""
    waiting = [folder]
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                check_path(os.path.relpath(entry.path, folder))
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)


def unpack(source: IO[bytes], folder: str) -> None:
    """A tar stream of folders, regular files and links, made by `rollart`."""
    os.makedirs(folder, exist_ok=True)
    with tarfile.open(fileobj=source, mode="r|") as archive:
        for member in archive:
            path = os.path.join(folder, member.name)
            if member.isdir():
                os.makedirs(path, exist_ok=True)
            elif member.issym():
                if os.path.islink(path):
                    os.unlink(path)
                os.symlink(member.linkname, path)
            elif member.isreg():
                content = archive.extractfile(member)
                assert content is not None
                with open(path, "wb") as file:
                    shutil.copyfileobj(content, file, CHUNK)
                os.chmod(path, member.mode & EACH_MODE)


def describe(error: Exception) -> dict[str, Any]:
    """An answer for a failed operation."""
    if isinstance(error, OSError) and error.strerror:
        name = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else ""
        return {"error": f"{name}: {error.strerror}" if name else error.strerror}
    return {"error": str(error)}


Operation = Callable[[dict[str, Any], list[int]], dict[str, Any]]


def _read(order: dict[str, Any], _: list[int]) -> dict[str, Any]:
    return {"descriptor": open_to_read(order["path"])}


def _write(order: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
    write(order["path"], descriptors[0], executable=order["executable"])
    return {}


def _pack_folder(order: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
    if not os.path.isdir(order["path"]):
        raise NotADirectoryError(f"{order['path']} is not a folder")
    with open(descriptors[0], "wb") as target:
        pack(order["path"], target)
    return {}


def _unpack_folder(order: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
    with open(descriptors[0], "rb") as source:
        unpack(source, order["path"])
    return {}


OPERATIONS: dict[str, Operation] = {
    "read": _read,
    "write": _write,
    "pack": _pack_folder,
    "unpack": _unpack_folder,
}
