"""Streams of files between this machine and the process that has entered a sandbox. What comes out is not trusted."""

import errno
import os
import shutil
import tarfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from rollart.backends.sandboxes.launcher.transfer import MAX_DEPTH
from rollart.types.errors import SandboxFault, SandboxFileError

CHUNK = 2**18
DRAFT = ".rollart-download"


@contextmanager
def send_file(content: bytes) -> Iterator[int]:
    """Descriptor to read the content from."""

    def feed(pipe: IO[bytes]) -> None:
        pipe.write(content)

    with _feeding(feed) as descriptor:
        yield descriptor


@contextmanager
def send_folder(source: Path) -> Iterator[int]:
    """Descriptor to read a tar stream of a folder from."""
    if not source.is_dir():
        raise SandboxFileError(f"{source} is no folder of this machine")

    def feed(pipe: IO[bytes]) -> None:
        with tarfile.open(fileobj=pipe, mode="w|", format=tarfile.PAX_FORMAT) as archive:
            for entry in sorted(source.iterdir()):
                archive.add(entry, entry.name)

    with _feeding(feed) as descriptor:
        yield descriptor


@contextmanager
def _feeding(feed: Callable[[IO[bytes]], None]) -> Iterator[int]:
    """A thread writes into a pipe while the other end is read elsewhere. Its error is raised at the end."""
    reader, writer = os.pipe()
    errors: list[OSError | tarfile.TarError] = []

    def run() -> None:
        try:
            with open(writer, "wb") as pipe:
                feed(pipe)
        except BrokenPipeError:
            pass  # the other side has stopped, and says why
        except (OSError, tarfile.TarError) as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="sandbox-upload", daemon=True)
    thread.start()
    try:
        yield reader
    finally:
        os.close(reader)
        thread.join()
    if errors:
        raise SandboxFileError(f"a folder of this machine could not be read: {errors[0]}")


@contextmanager
def receive_folder(target: Path, *, max_bytes: int, max_files: int) -> Iterator[int]:
    """Descriptor to write a tar stream to; at the end `target` is there, or nothing is."""
    if target.exists():
        raise SandboxFileError(f"{target} exists; a download makes a new folder")
    draft = target.with_name(f"{DRAFT}-{target.name}-{os.getpid()}-{threading.get_ident()}")
    try:
        draft.mkdir()
    except OSError as error:
        raise SandboxFault(f"a download cannot be written to this machine: {error}") from error
    reader, writer = os.pipe()
    problems: list[str] = []
    faults: list[OSError] = []
    """Errors of this machine, such as a full disk, are faults."""

    def run() -> None:
        with open(reader, "rb") as pipe:
            try:
                _unpack(pipe, draft, max_bytes, max_files)
            except SandboxFileError as error:
                problems.append(str(error))
            except OSError as error:
                if error.errno == errno.ENAMETOOLONG:
                    problems.append(f"a download has a path that is too long: {error}")
                else:
                    faults.append(error)
            except (tarfile.TarError, ValueError) as error:
                problems.append(f"a download broke off: {error}")

    thread = threading.Thread(target=run, name="sandbox-download", daemon=True)
    thread.start()
    stopped = ""
    try:
        try:
            yield writer
        except (SandboxFileError, BrokenPipeError) as error:
            stopped = str(error)  # the sender notices only that it cannot go on; the receiver knows why
        finally:
            with suppress(OSError):
                os.close(writer)
            thread.join()
        if faults:
            raise SandboxFault(f"a download could not be written to this machine: {faults[0]}")
        if problems or stopped:
            raise SandboxFileError(problems[0] if problems else stopped)
        draft.rename(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _unpack(pipe: IO[bytes], folder: Path, max_bytes: int, max_files: int) -> None:
    left_bytes, left_files = max_bytes, max_files
    with tarfile.open(fileobj=pipe, mode="r|") as archive:
        for member in archive:
            left_files -= 1
            left_bytes -= member.size
            if left_files < 0 or left_bytes < 0:
                raise SandboxFileError(f"a download has more than {max_files} files or {max_bytes} bytes")
            parts = member.name.split("/")
            if len(parts) > MAX_DEPTH:
                raise SandboxFileError(f"a download has folders that are nested more than {MAX_DEPTH} deep")
            if member.name.startswith("/") or ".." in parts or not (member.isreg() or member.isdir()):
                raise SandboxFileError(f"a download contains {member.name!r}, which is no plain file or folder")
            path = folder.joinpath(*parts)
            if member.isdir():
                path.mkdir(parents=True, exist_ok=True)
                continue
            content = archive.extractfile(member)
            assert content is not None
            with path.open("xb") as file:
                shutil.copyfileobj(content, file, CHUNK)
            path.chmod(0o755 if member.mode & 0o100 else 0o644)
