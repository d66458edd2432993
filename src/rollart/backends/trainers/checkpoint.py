"""Checkpoints on disk: folders of files that are there whole or not at all.

    <root>/step-00000012.epoch-0/        the checkpoint of v0.12
        model.safetensors, …             what the trainer gave to keep
        state.json                       the version, the trainer's facts, the digests of all other files and its own
    <root>/.step-00000013.epoch-0.tmp/   being written or being removed; never read

What holds:
- a folder gets its name only when all of it is on the disk, and loses its name before any of it is removed, so that a
  process killed anywhere leaves every named folder whole;
- a save that fails leaves nothing behind, and the checkpoints before it as they were;
- what is read was verified by digest first; a damaged checkpoint is passed over for the one before, never in silence;
- only JSON and safetensors are read, and only the files that `state.json` names: nothing in a folder is ever executed;
- versions only grow, so a trainer that was replaced and does not know it can neither hide nor remove what its
  successor saved.
"""

import hashlib
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from rollart.types.errors import RequestError
from rollart.types.versions import Version
from rollart.types.weights import bucket_digest

logger = logging.getLogger(__name__)

STATE = "state.json"
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
"""Kept beside the weights, so that the folder is a model for whoever takes it; not read here."""
_NAME = re.compile(r"step-(\d{8,})\.epoch-(\d+)")
_DRAFT = re.compile(rf"\.{_NAME.pattern}\.tmp")


class NotSaved(Exception):
    """The checkpoint was not written; those before it are whole."""


class _Damaged(Exception):
    """A folder is not what was written there."""


class Checkpoint(NamedTuple):
    """A whole checkpoint, verified."""

    version: Version
    folder: Path
    files: Mapping[str, str]
    facts: Mapping[str, Any]

    def file(self, name: str) -> Path:
        """Where a verified file lies; there is no way to the others."""
        if name not in self.files:
            raise RequestError(
                f"checkpoint {self.folder} has no {name}: another kind of trainer wrote it. "
                "Give this one a folder for checkpoints of its own."
            )
        return self.folder / name


class _State(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`state.json`. Written last; `digest` is of the rest of it, in canonical form."""

    format: Literal[1] = 1
    version: Version
    files: dict[str, str]
    facts: dict[str, Any]
    digest: str = ""

    def own_digest(self) -> str:
        bare = msgspec.structs.replace(self, digest="")
        return bucket_digest(msgspec.json.encode(bare, order="deterministic"))

    def sealed(self) -> bytes:
        whole = msgspec.structs.replace(self, digest=self.own_digest())
        return msgspec.json.format(msgspec.json.encode(whole, order="deterministic"), indent=2)


def write_file(path: Path, data: bytes) -> None:
    """A new file, on the disk when this returns."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


class Checkpoints:
    """The checkpoints of one run. `write` puts one file on the disk; tests let it fail."""

    def __init__(self, root: Path, *, keep: int = 2, write: Callable[[Path, bytes], None] = write_file) -> None:
        self._root = root
        self._keep = keep
        self._write = write
        self._damaged: set[Version] = set()
        """Found so by `newest`; they stand in nobody's way and go with the next save."""

    def newest(self) -> Checkpoint | None:
        """The newest whole checkpoint; None if none was ever saved."""
        held = sorted(self.held(), reverse=True)
        for version in held:
            try:
                return _verified(self.folder(version), version)
            except _Damaged as damage:
                self._damaged.add(version)
                logger.warning("checkpoint %s is damaged and passed over: %s", self.folder(version), damage)
        if held:
            # To start afresh in silence would throw a run away over a disk that may only be unreadable today.
            raise RequestError(
                f"none of the {len(held)} checkpoints in {self._root} is whole (the log says why of each). "
                "Bring one back, or remove the folder to start afresh."
            )
        return None

    def save(self, version: Version, files: Iterable[tuple[str, bytes]], facts: Mapping[str, Any]) -> None:
        """Make a checkpoint of these files, one at a time in memory; raises `NotSaved`."""
        folder, draft = self.folder(version), self._draft(version)
        try:
            self._admit(version)
            try:
                draft.mkdir()
                digests = {}
                for name, data in files:
                    self._write(draft / name, data)
                    digests[name] = bucket_digest(data)
                self._write(draft / STATE, _State(version=version, files=digests, facts=dict(facts)).sealed())
                sync_folder(draft)
                draft.rename(folder)
                sync_folder(self._root)
            except OSError:
                self._remove(version)
                raise
        except OSError as error:
            raise NotSaved(
                f"the checkpoint of {version} could not be written to {self._root}: {error}. "
                "The one before it is whole; make room, or set `checkpoints` to another disk."
            ) from error
        self._damaged.discard(version)
        self._prune()

    def _admit(self, version: Version) -> None:
        """Make ready for a version newer than all that are whole; what was cut before it makes room."""
        if not self._root.is_dir():
            self._root.mkdir(parents=True, exist_ok=True)
            sync_folder(self._root.parent)
        newest = max((held for held in self.held() if held not in self._damaged), default=None)
        if newest is not None and version <= newest:
            raise NotSaved(
                f"{version} is not newer than the checkpoint of {newest} in {self._root}: versions only grow. "
                "Start the trainer in a new epoch."
            )
        for left in self._versions(_DRAFT):
            if left <= version:  # a newer one is the work of a successor
                shutil.rmtree(self._draft(left))
        if version in self._damaged:
            self._remove(version)

    def _prune(self) -> None:
        whole = sorted(version for version in self.held() if version not in self._damaged)
        for version in (*sorted(self._damaged), *whole[: -self._keep]):
            self._remove(version)

    def _remove(self, version: Version) -> None:
        """Best effort: what stays behind is a draft, and goes with the next save."""
        with suppress(OSError):
            self.folder(version).rename(self._draft(version))
        shutil.rmtree(self._draft(version), ignore_errors=True)
        self._damaged.discard(version)

    def held(self) -> list[Version]:
        """What has a folder, oldest first: whole when it was written, not verified since."""
        return self._versions(_NAME)

    def _versions(self, pattern: re.Pattern[str]) -> list[Version]:
        if not self._root.is_dir():
            return []
        matches = [pattern.fullmatch(entry.name) for entry in self._root.iterdir() if entry.is_dir()]
        return sorted(Version(epoch=int(match[2]), step=int(match[1])) for match in matches if match)

    def folder(self, version: Version) -> Path:
        """Where the checkpoint of a version lies, if it is held."""
        return self._root / f"step-{version.step:08}.epoch-{version.epoch}"

    def _draft(self, version: Version) -> Path:
        return self._root / f".{self.folder(version).name}.tmp"


def _verified(folder: Path, version: Version) -> Checkpoint:
    try:
        state = msgspec.json.decode((folder / STATE).read_bytes(), type=_State)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _Damaged(f"{STATE} cannot be read: {error}") from error
    if state.digest != state.own_digest():
        raise _Damaged(f"{STATE} does not have its own digest")
    if state.version != version:
        raise _Damaged(f"{STATE} is that of {state.version}")
    for name, digest in state.files.items():
        if name != Path(name).name or not (name.endswith(READABLE) or name in TOKENIZER_FILES):
            raise _Damaged(f"{STATE} names {name!r}; only safetensors and JSON of this folder are read")
        try:
            with (folder / name).open("rb") as file:
                found = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
        except OSError as error:
            raise _Damaged(f"{name} cannot be read: {error}") from error
        if found != digest:
            raise _Damaged(f"{name} does not have the digest that {STATE} gives")
    return Checkpoint(version, folder, state.files, state.facts)


def sync_folder(folder: Path) -> None:
    """The names in a folder, on the disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
