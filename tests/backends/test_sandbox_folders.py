"""Folders out of a sandbox: what this machine cannot write is a fault, and not a wrong path of the agent."""

import io
import resource
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rollart.backends.sandboxes.folders import receive_folder
from rollart.types.errors import SandboxFault, SandboxFileError


def packed(size: int) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        member = tarfile.TarInfo("file")
        member.size = size
        archive.addfile(member, io.BytesIO(bytes(size)))
    return stream.getvalue()


@contextmanager
def full_disk(at_bytes: int) -> Iterator[None]:
    """No file of this process can become larger."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (at_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def receive(content: bytes, target: Path, max_bytes: int = 2**30) -> None:
    with (
        receive_folder(target, max_bytes=max_bytes, max_files=10) as descriptor,
        open(descriptor, "wb", closefd=False) as pipe,
    ):
        pipe.write(content)


def test_a_full_disk_is_a_fault(tmp_path: Path) -> None:
    with full_disk(1000), pytest.raises(SandboxFault, match="could not be written to this machine"):
        receive(packed(300_000), tmp_path / "target")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(SandboxFault, match="cannot be written to this machine"):
        receive(packed(1), tmp_path / "missing" / "target")


def test_a_sender_learns_why_nobody_reads_on(tmp_path: Path) -> None:
    with pytest.raises(SandboxFileError, match="more than 10 files or 1000 bytes"):
        receive(packed(300_000), tmp_path / "target", max_bytes=1000)
    assert list(tmp_path.iterdir()) == []
