"""Prompts from files: JSON lines, or a folder with one prompt per file.

Invariants, besides those of every source (`prompts`):
- Every cursor carries the digest of the files, so a run cannot resume on different prompts.
- With `held_out`, the content of a prompt decides which side it is on.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollart.tasks.prompts import ShuffledPrompts
from rollart.tasks.split import is_held_out
from rollart.types.errors import RequestError
from rollart.types.ids import PromptId
from rollart.types.trajectory import Prompt

Row = Mapping[str, Any]


class FilePrompts(ShuffledPrompts):
    """Rows by id; the seed of a prompt is its row number. `held_out` selects a side of the split; None selects all."""

    def __init__(
        self, task: str, path: Path, rows: Mapping[str, Row], digest: str, shuffle_seed: int, held_out: bool | None
    ) -> None:
        kept = [
            number for number, row in enumerate(rows.values()) if held_out is None or _on_held_out_side(row) == held_out
        ]
        if not kept:
            side = "" if held_out is None else " held out" if held_out else " to train on"
            raise RequestError(f"{path} has no prompts{side} for {task!r}; add more")
        self._prompts = [
            Prompt(id=PromptId(id), task=task, seed=number, data=dict(row))
            for number, (id, row) in enumerate(rows.items())
        ]
        super().__init__(kept, {"task": task, "digest": digest, "held_out": held_out}, shuffle_seed)

    def _prompt(self, number: int) -> Prompt:
        return self._prompts[number]


class JsonLinesPrompts(FilePrompts):
    """One JSON object per line, which becomes the prompt's data. The prompt's id is `id`, or else the line number."""

    def __init__(self, task: str, path: str, *, shuffle_seed: int = 0, held_out: bool | None = None) -> None:
        file = Path(path)
        data = _read(file)
        rows: dict[str, Row] = {}
        for number, line in enumerate(data.splitlines(), 1):
            if not line.strip():
                continue
            row = _object(file, number, line)
            id = str(row.get("id", number))
            if id in rows:
                raise RequestError(f"{file}, line {number}: duplicate id {id!r}; every line needs its own")
            rows[id] = row
        super().__init__(task, file, rows, _digest({"": data}), shuffle_seed, held_out)


class FolderPrompts(FilePrompts):
    """One text per file, recursively and without hidden files. Data: `name`, which is also the id, and `text`."""

    def __init__(self, task: str, path: str, *, shuffle_seed: int = 0, held_out: bool | None = None) -> None:
        folder = Path(path)
        if not folder.is_dir():
            raise RequestError(f"prompts of {task!r}: {folder} is not a folder")
        contents: dict[str, bytes] = {}
        for file in sorted(folder.rglob("*")):
            place = file.relative_to(folder)
            if file.is_file() and not any(part.startswith(".") for part in place.parts):
                contents[place.as_posix()] = _read(file)
        rows = {name: {"name": name, "text": _text(folder / name, data)} for name, data in contents.items()}
        super().__init__(task, folder, rows, _digest(contents), shuffle_seed, held_out)


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise RequestError(f"cannot read prompts from {file}: {error.strerror}") from error


def _text(file: Path, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"{file} is not UTF-8 text ({error.reason}); remove it from the folder") from error


def _object(file: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise RequestError(f"{file}, line {number}: not JSON ({error})") from error
    if not isinstance(row, dict):
        raise RequestError(f"{file}, line {number}: expected a JSON object, not a {type(row).__name__}")
    return row


def _on_held_out_side(row: Row) -> bool:
    """Decided by content, not by name: the same content under two names is on the same side."""
    return is_held_out(json.dumps({key: row[key] for key in sorted(row) if key not in ("id", "name")}))


def _digest(contents: Mapping[str, bytes]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, data in contents.items():
        digest.update(f"{len(name.encode())}/{len(data)}/{name}".encode() + data)
    return digest.hexdigest()
