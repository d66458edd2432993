"""Prompts from files: JSON lines, or a folder with a file for each.

What holds, besides what holds of all sources (`prompts`): the digest of what was read is in every cursor, so that a run
is not resumed on other prompts than it was started with; with `held_out`, a prompt is on one side by its content.
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
    """Rows by their id; the seed of a prompt is the number of its row. `held_out`: only that side; None for all."""

    def __init__(
        self, task: str, path: Path, rows: Mapping[str, Row], digest: str, shuffle_seed: int, held_out: bool | None
    ) -> None:
        kept = [
            number for number, row in enumerate(rows.values()) if held_out is None or _on_held_out_side(row) == held_out
        ]
        if not kept:
            side = "" if held_out is None else " held out" if held_out else " to train on"
            raise RequestError(f"{path} has no prompt{side} for {task!r}; give it more of them")
        self._prompts = [
            Prompt(id=PromptId(id), task=task, seed=number, data=dict(row))
            for number, (id, row) in enumerate(rows.items())
        ]
        super().__init__(kept, {"task": task, "digest": digest, "held_out": held_out}, shuffle_seed)

    def _prompt(self, number: int) -> Prompt:
        return self._prompts[number]


class JsonLinesPrompts(FilePrompts):
    """A JSON object per line, which becomes the prompt's data. Its `id`, if it has one, else the line's number."""

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
                raise RequestError(f"{file}, line {number}: the id {id!r} came before; every line needs its own")
            rows[id] = row
        super().__init__(task, file, rows, _digest({"": data}), shuffle_seed, held_out)


class FolderPrompts(FilePrompts):
    """A text per file, all below a folder but for hidden ones: data `name`, which is also the id, and `text`."""

    def __init__(self, task: str, path: str, *, shuffle_seed: int = 0, held_out: bool | None = None) -> None:
        folder = Path(path)
        if not folder.is_dir():
            raise RequestError(f"prompts of {task!r}: {folder} is no folder")
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
        raise RequestError(f"prompts cannot be read from {file}: {error.strerror}") from error


def _text(file: Path, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"{file} is no text in UTF-8 ({error.reason}); take it out of the folder") from error


def _object(file: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise RequestError(f"{file}, line {number}: no JSON ({error})") from error
    if not isinstance(row, dict):
        raise RequestError(f"{file}, line {number}: a JSON object is needed, not a {type(row).__name__}")
    return row


def _on_held_out_side(row: Row) -> bool:
    """By what a prompt says and not by what it is called: the same content under two names is on one side."""
    return is_held_out(json.dumps({key: row[key] for key in sorted(row) if key not in ("id", "name")}))


def _digest(contents: Mapping[str, bytes]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, data in contents.items():
        digest.update(f"{len(name.encode())}/{len(data)}/{name}".encode() + data)
    return digest.hexdigest()
