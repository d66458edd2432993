"""A store that several processes of this machine publish one version to, for tests of ranks: files in a folder."""

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from rollart.types.errors import WeightError
from rollart.types.versions import Version
from rollart.types.weights import Manifest, verify_bucket


class ShardedFolder:
    """A `ShardedWeightStore`. Picklable; it records which process wrote what."""

    def __init__(self, folder: Path, refuses: str = "") -> None:
        self.folder = folder
        self.refuses = refuses
        """Name of the method that fails, everywhere but in the process that made this store."""
        self.owner = os.getpid()

    def begin(self, manifest: Manifest) -> None:
        self._of(manifest.version).mkdir()
        self._draft(manifest.version).write_bytes(msgspec.json.encode(manifest))

    def put(self, version: Version, index: int, data: bytes | memoryview) -> None:
        if self.refuses == "put" and os.getpid() != self.owner:
            raise WeightError("this disk is full")
        verify_bucket(msgspec.json.decode(self._draft(version).read_bytes(), type=Manifest), index, data)
        half = self._of(version) / f"half.{index}"
        half.write_bytes(data)
        half.rename(self._of(version) / f"bucket.{index}.{os.getpid()}")

    def commit(self, version: Version, wait_s: float = 0.0) -> None:
        assert wait_s
        manifest = msgspec.json.decode(self._draft(version).read_bytes(), type=Manifest)
        while len(self.writers(version)) < len(manifest.digests):
            if (self._of(version) / "aborted").exists():
                raise WeightError(f"the publication of {version} was given up")
            os.sched_yield()
        self._draft(version).rename(self._of(version) / "manifest")

    def abort(self, version: Version) -> None:
        (self._of(version) / "aborted").touch()

    def publish(self, manifest: Manifest, buckets: Iterable[bytes | memoryview]) -> None:
        self.begin(manifest)
        for index, bucket in enumerate(buckets):
            self.put(manifest.version, index, bucket)
        self.commit(manifest.version, wait_s=1.0)

    def manifest(self, version: Version) -> Manifest:
        return msgspec.json.decode((self._of(version) / "manifest").read_bytes(), type=Manifest)

    def bucket(self, version: Version, index: int) -> bytes:
        (path,) = self._of(version).glob(f"bucket.{index}.*")
        return path.read_bytes()

    def newest(self) -> Version | None:
        raise NotImplementedError

    def drop(self, version: Version) -> None: ...

    def writers(self, version: Version) -> dict[int, int]:
        """By bucket, the process that wrote it."""
        names = [path.name.split(".") for path in self._of(version).glob("bucket.*")]
        return {int(index): int(process) for _, index, process in names}

    def _of(self, version: Version) -> Path:
        return self.folder / str(version)

    def _draft(self, version: Version) -> Path:
        return self._of(version) / "draft"
