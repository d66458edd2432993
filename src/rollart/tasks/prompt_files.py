"""Prompts from data: JSON lines, Parquet, a folder of either or of texts, or rows that Python code gave.

Invariants, besides those of every source (`prompts`):
- Every cursor carries the digest of the data, so a run cannot resume on different prompts.
- With `held_out`, the content of a row decides which side it is on.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rollart.config.held_out import HELD_OUT_SHARE
from rollart.config.rows import Rows
from rollart.tasks.prompts import ShuffledPrompts
from rollart.tasks.split import is_held_out
from rollart.types.errors import RequestError
from rollart.types.ids import PromptId
from rollart.types.trajectory import Prompt

Row = Mapping[str, Any]
LINES, PARQUET = ".jsonl", ".parquet"


class Table(NamedTuple):
    """Rows by id, in order. `digest` is that of their files."""

    name: str
    rows: Mapping[str, Row]
    digest: str


class TablePrompts(ShuffledPrompts):
    """Rows of a table; the seed of a prompt is its row number. `held_out` selects a side of the split; None, all."""

    def __init__(
        self,
        task: str,
        table: Table,
        *,
        shuffle_seed: int = 0,
        held_out: bool | None = None,
        share: float = HELD_OUT_SHARE,
    ) -> None:
        kept = [
            number
            for number, row in enumerate(table.rows.values())
            if held_out is None or is_held_out(content_of(row), share) == held_out
        ]
        if not kept:
            side = "" if held_out is None else " held out" if held_out else " to train on"
            raise RequestError(f"{table.name} has no prompts{side} for {task!r}; add more")
        self._prompts = [
            Prompt(id=PromptId(id), task=task, seed=number, data=dict(row))
            for number, (id, row) in enumerate(table.rows.items())
        ]
        identity: dict[str, Any] = {"task": task, "digest": table.digest, "held_out": held_out}
        if held_out is not None and share != HELD_OUT_SHARE:
            identity["share"] = share
        super().__init__(kept, identity, shuffle_seed)

    def _prompt(self, number: int) -> Prompt:
        return self._prompts[number]


class JsonLinesPrompts(TablePrompts):
    """One JSON object per line, which becomes the prompt's data. The prompt's id is `id`, or else the line number."""

    def __init__(self, task: str, path: str, *, shuffle_seed: int = 0, held_out: bool | None = None) -> None:
        super().__init__(task, _json_lines(path, _read(Path(path))), shuffle_seed=shuffle_seed, held_out=held_out)


class FolderPrompts(TablePrompts):
    """One text per file, recursively and without hidden files. Data: `name`, which is also the id, and `text`."""

    def __init__(self, task: str, path: str, *, shuffle_seed: int = 0, held_out: bool | None = None) -> None:
        folder = Path(path)
        if not folder.is_dir():
            raise RequestError(f"prompts of {task!r}: {folder} is not a folder")
        super().__init__(task, _folder(folder), shuffle_seed=shuffle_seed, held_out=held_out)


def read_table(source: str | Rows) -> Table:
    """The rows of a file, of a folder, or given from Python."""
    if isinstance(source, Rows):
        return _json_lines("the given data", source.lines)
    path = Path(source)
    if path.is_dir():
        return _folder(path)
    data = _read(path)
    return _parquet(source, data) if path.suffix == PARQUET else _json_lines(source, data)


def content_of(row: Row) -> str:
    """What decides the side of a row: its content without its name, so that two copies are on the same side."""
    return json.dumps({key: row[key] for key in sorted(row) if key not in ("id", "name")}, default=str)


def _json_lines(name: str, data: bytes) -> Table:
    lines = ((number, line) for number, line in enumerate(data.splitlines(), 1) if line.strip())
    rows = ((number, _object(name, number, line)) for number, line in lines)
    return Table(name, _by_id(name, "line", rows), _digest({"": data}))


def _parquet(name: str, data: bytes) -> Table:
    return Table(name, _by_id(name, "row", enumerate(_parquet_rows(name, data), 1)), _digest({"": data}))


def _parquet_rows(name: str, data: bytes) -> Iterator[dict[str, Any]]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError as error:
        raise RequestError(f"reading {name} needs pyarrow; install it with: pip install 'rollart[data]'") from error
    try:
        table = pq.read_table(pa.BufferReader(data))
    except pa.ArrowException as error:
        raise RequestError(f"{name} is not a Parquet file ({error})") from error
    for field in table.schema:
        if pa.types.is_binary(field.type) or pa.types.is_large_binary(field.type):
            raise RequestError(f"{name}: the column {field.name!r} is binary, which a prompt cannot hold; drop it")
    for line in map(msgspec.json.encode, table.to_pylist()):
        yield msgspec.json.decode(line)  # dates and decimals become text, as in JSON lines


def _folder(folder: Path) -> Table:
    """Shards in the order of their names if all files are tables; else a text per file."""
    if (folder / "dataset_info.json").is_file():
        raise RequestError(
            f"{folder} was written by datasets.save_to_disk; from Python, give prompts=datasets.load_from_disk(…)"
        )
    files = {
        file.relative_to(folder).as_posix(): file
        for file in sorted(folder.rglob("*"))
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    }
    contents = {name: _read(file) for name, file in files.items()}
    if files and all(file.suffix in (LINES, PARQUET) for file in files.values()):
        rows = ((f"{name}/{id}", row) for name, data in contents.items() for id, row in _shard(name, data).items())
        return Table(str(folder), dict(rows), _digest(contents))
    table = next((name for name, file in files.items() if file.suffix in (LINES, PARQUET)), None)
    if table is not None:
        other = next(name for name, file in files.items() if file.suffix not in (LINES, PARQUET))
        raise RequestError(f"{folder} has tables ({table}) and other files ({other}); give the tables alone")
    texts = {name: {"name": name, "text": _text(files[name], data)} for name, data in contents.items()}
    return Table(str(folder), texts, _digest(contents))


def _shard(name: str, data: bytes) -> Mapping[str, Row]:
    return (_parquet if name.endswith(PARQUET) else _json_lines)(name, data).rows


def _by_id(name: str, unit: str, rows: Iterable[tuple[int, Row]]) -> dict[str, Row]:
    found: dict[str, Row] = {}
    for number, row in rows:
        id = str(row.get("id", number))
        if id in found:
            raise RequestError(f"{name}, {unit} {number}: duplicate id {id!r}; every {unit} needs its own")
        try:
            msgspec.msgpack.encode(row)  # as it travels to workers, and is kept in transcripts
        except (OverflowError, TypeError, ValueError) as error:
            raise RequestError(f"{name}, {unit} {number}: {error}; write large numbers as text") from error
        found[id] = row
    return found


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


def _object(name: str, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise RequestError(f"{name}, line {number}: not JSON ({error})") from error
    if not isinstance(row, dict):
        raise RequestError(f"{name}, line {number}: expected a JSON object, not a {type(row).__name__}")
    return row


def _digest(contents: Mapping[str, bytes]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, data in contents.items():
        digest.update(f"{len(name.encode())}/{len(data)}/{name}".encode() + data)
    return digest.hexdigest()
