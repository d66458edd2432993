"""Checkpoints on disk: folders that are either complete or absent.

    <root>/step-00000012.epoch-0/        the checkpoint of v0.12
        model.safetensors, …             the trainer's files
        state.json                       version, the trainer's facts, digests of all other files and of itself
    <root>/.step-00000013.epoch-0.tmp/   a draft being written or removed; never read

Invariants:
- A folder gets its name only once all of it is on disk, and loses its name before any of it is removed, so a process
  killed at any point leaves every named folder complete.
- A failed save leaves nothing behind and does not touch earlier checkpoints.
- Everything read is verified by digest first; a damaged checkpoint is skipped for the one before it, with a warning.
- A checkpoint of a newer rollart, with digests that this one cannot compute, is an error: it is not damaged, and stays.
- Only JSON and safetensors are read, and only files listed in `state.json`: nothing in a folder is ever executed.
- Versions only grow, so a stale trainer that was replaced can neither hide nor remove its successor's checkpoints.
"""

import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from rollart.ports.folder_transfer import sync_folder
from rollart.types.digests import bulk_digest, matches, record_digest
from rollart.types.errors import RequestError, UnknownDigest
from rollart.types.versions import Version

logger = logging.getLogger(__name__)

STATE = "state.json"
CHUNK_BYTES = 1 << 20
"""Read at once to verify a file: small enough to stay in the cache until it is hashed."""
READABLE = (".safetensors", ".json")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)
"""Kept beside the weights, so that the folder loads as a model elsewhere; not read here."""
_NAME = re.compile(r"step-(\d{8,})\.epoch-(\d+)")
_DRAFT = re.compile(rf"\.{_NAME.pattern}(?:\.[0-9a-f]+)?\.tmp")
"""Own drafts, and those of checkpoints that were received from another machine."""


class NotSaved(Exception):
    """The checkpoint was not written; earlier ones are intact."""


class Damaged(Exception):
    """The contents of a folder differ from what was written."""


class Checkpoint(NamedTuple):
    """A complete, verified checkpoint."""

    version: Version
    folder: Path
    files: Mapping[str, str]
    facts: Mapping[str, Any]

    def file(self, name: str) -> Path:
        """Path of a verified file; unlisted files cannot be reached."""
        if name not in self.files:
            raise RequestError(
                f"checkpoint {self.folder} has no {name}: it was written by a different kind of trainer. "
                "Give this one its own folder for checkpoints."
            )
        return self.folder / name


class CheckpointPlace(msgspec.Struct, frozen=True):
    """Checkpoints that are kept on another machine than the trainer's (`remote_checkpoints`)."""

    files: Any
    """`RunFiles` that holds them; picklable."""
    run: str
    """Name of the scratch folder on the trainer's machine, unique to the run."""


class _State(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`state.json`. Written last; `digest` covers the rest of the file, in canonical form."""

    format: Literal[1] = 1
    version: Version
    files: dict[str, str]
    facts: dict[str, Any]
    digest: str = ""

    def own_digest(self) -> str:
        bare = msgspec.structs.replace(self, digest="")
        return record_digest(msgspec.json.encode(bare, order="deterministic"))

    def sealed(self) -> bytes:
        whole = msgspec.structs.replace(self, digest=self.own_digest())
        return msgspec.json.format(msgspec.json.encode(whole, order="deterministic"), indent=2)


def write_file(path: Path, data: bytes) -> None:
    """Write a new file; it is on disk when this returns."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


class Checkpoints:
    """The checkpoints of one run. `write` stores one file; tests inject failures through it."""

    def __init__(self, root: Path, *, keep: int = 2, write: Callable[[Path, bytes], None] = write_file) -> None:
        self._root = root
        self._keep = keep
        self._write = write
        self._damaged: set[Version] = set()
        """Versions that `newest` found damaged; ignored, and removed by the next save."""

    def newest(self) -> Checkpoint | None:
        """The newest complete checkpoint; None if nothing was ever saved."""
        held = sorted(self.held(), reverse=True)
        for version in held:
            try:
                return verified(self.folder(version), version)
            except Damaged as damage:
                self._damaged.add(version)
                logger.warning("skipping damaged checkpoint %s: %s", self.folder(version), damage)
        if held:
            # Starting from scratch silently could discard a run because of a disk that is only temporarily unreadable.
            raise RequestError(
                f"none of the {len(held)} checkpoints in {self._root} is intact (the log has the reason for each). "
                "Restore one, or remove the folder to start from scratch."
            )
        return None

    def save(self, version: Version, files: Iterable[tuple[str, bytes]], facts: Mapping[str, Any]) -> None:
        """Write these files as a checkpoint, with one file in memory at a time; raises `NotSaved`."""
        folder, draft = self.folder(version), self._draft(version)
        try:
            self._admit(version)
            try:
                draft.mkdir()
                digests = {}
                for name, data in files:
                    self._write(draft / name, data)
                    digests[name] = bulk_digest(data)
                self._write(draft / STATE, _State(version=version, files=digests, facts=dict(facts)).sealed())
                sync_folder(draft)
                draft.rename(folder)
                sync_folder(self._root)
            except OSError:
                self._remove(version)
                raise
        except OSError as error:
            raise NotSaved(
                f"cannot write the checkpoint of {version} to {self._root}: {error}. "
                "The previous one is intact; free some space there."
            ) from error
        self._damaged.discard(version)
        self._prune()

    def _admit(self, version: Version) -> None:
        """Prepare for a version newer than every complete one; leftover drafts are removed."""
        if not self._root.is_dir():
            self._root.mkdir(parents=True, exist_ok=True)
            sync_folder(self._root.parent)
        newest = max((held for held in self.held() if held not in self._damaged), default=None)
        if newest is not None and version <= newest:
            raise NotSaved(
                f"{version} is not newer than the checkpoint of {newest} in {self._root}: versions only grow. "
                "Start the trainer in a new epoch."
            )
        for left, path in self._named(_DRAFT):
            if left <= version:  # a newer one belongs to a successor
                shutil.rmtree(path)
        if version in self._damaged:
            self._remove(version)

    def _prune(self) -> None:
        whole = sorted(version for version in self.held() if version not in self._damaged)
        for version in (*sorted(self._damaged), *whole[: -self._keep]):
            self._remove(version)

    def _remove(self, version: Version) -> None:
        """Best effort: whatever remains is a draft, removed by the next save."""
        with suppress(OSError):
            self.folder(version).rename(self._draft(version))
        shutil.rmtree(self._draft(version), ignore_errors=True)
        self._damaged.discard(version)

    def held(self) -> list[Version]:
        """Versions with a folder, oldest first: complete when written, not verified since."""
        return sorted(version for version, _ in self._named(_NAME))

    def close(self) -> None:
        """Nothing is held open."""

    def _named(self, pattern: re.Pattern[str]) -> list[tuple[Version, Path]]:
        if not self._root.is_dir():
            return []
        found = [(pattern.fullmatch(path.name), path) for path in self._root.iterdir() if path.is_dir()]
        return [(Version(epoch=int(match[2]), step=int(match[1])), path) for match, path in found if match]

    def folder(self, version: Version) -> Path:
        """Folder of a version, if it is held."""
        return self._root / folder_name(version)

    def _draft(self, version: Version) -> Path:
        return self._root / f".{self.folder(version).name}.tmp"


def folder_name(version: Version) -> str:
    """Name of the folder of a version.

    >>> folder_name(Version(epoch=0, step=12))
    'step-00000012.epoch-0'
    """
    return f"step-{version.step:08}.epoch-{version.epoch}"


def version_of(name: str) -> Version | None:
    """Version of a folder; None if it is not that of a checkpoint."""
    match = _NAME.fullmatch(name)
    return Version(epoch=int(match[2]), step=int(match[1])) if match else None


def verified(folder: Path, version: Version) -> Checkpoint:
    """The checkpoint in a folder, with every file verified; raises `Damaged`."""
    try:
        state = msgspec.json.decode((folder / STATE).read_bytes(), type=_State)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Damaged(f"cannot read {STATE}: {error}") from error
    if state.digest != state.own_digest():
        raise Damaged(f"{STATE} does not match its own digest")
    if state.version != version:
        raise Damaged(f"{STATE} belongs to {state.version}")
    for name, digest in state.files.items():
        if name != Path(name).name or not (name.endswith(READABLE) or name in TOKENIZER_FILES):
            raise Damaged(f"{STATE} lists {name!r}; only safetensors and JSON in this folder are read")
        try:
            intact = matches(digest, _chunks(folder / name))
        except OSError as error:
            raise Damaged(f"cannot read {name}: {error}") from error
        except UnknownDigest as error:
            raise RequestError(f"cannot verify {name} of checkpoint {folder}: {error}") from error
        if not intact:
            raise Damaged(f"{name} does not match its digest in {STATE}")
    return Checkpoint(version, folder, state.files, state.facts)


def _chunks(path: Path) -> Iterator[memoryview]:
    """Content of a file, in chunks that are valid until the next one."""
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            yield buffer[:count]


def write_folder(folder: Path, files: Iterable[tuple[str, bytes]]) -> None:
    """A new folder of files, which gets its name when all of it is on the disk."""
    draft = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(draft, ignore_errors=True)  # left behind by a writer that was killed
    draft.mkdir(parents=True)
    for name, data in files:
        write_file(draft / name, data)
    sync_folder(draft)
    draft.rename(folder)
    sync_folder(folder.parent)
