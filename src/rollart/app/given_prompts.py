"""Prompts given from Python: read once, and kept in the folder of the run.

<run>/prompts/gsm.jsonl    `prompts` of the task `gsm`; `gsm-eval.jsonl` are its `eval_prompts`
"""

import re
from collections.abc import Iterable, Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import msgspec

from rollart.config.rows import RUN_FOLDER, Rows
from rollart.config.schema import RunConfig
from rollart.types.errors import ConfigError

FOLDER = "prompts"
Given = tuple[int, int] | str | Rows


def rows_or_seeds(key: str, given: Any) -> Given:
    """What a config holds of `prompts`: seeds and paths as they are, rows as JSON lines.

    >>> rows_or_seeds("prompts", range(10, 20)), rows_or_seeds("prompts", "data.jsonl")
    ((10, 20), 'data.jsonl')
    >>> rows_or_seeds("prompts", ({"question": f"{n}+{n}"} for n in range(3)))
    <3 rows>
    """
    match given:
        case range():
            if given.step != 1:
                raise ConfigError(key, f"{given} skips seeds; give a range with a step of 1, or rows")
            return (given.start, given.stop)
        case [int(), int()]:
            return (given[0], given[1])
        case str():
            return str(given)
        case Rows():
            return given
        case PathLike():
            return str(fspath(given))
        case Mapping():
            parts = ", ".join(map(str, given))
            raise ConfigError(key, f"is one {type(given).__name__} of {parts}; give one of these, or a list of rows")
    if not isinstance(given, Iterable):
        raise ConfigError(key, f"is a {type(given).__name__}; give rows (dicts), a path, or a range of seeds")
    lines = [_line(key, number, row) for number, row in enumerate(given)]
    if not lines:
        raise ConfigError(key, "has no rows")
    return Rows(b"".join(lines))


def _line(key: str, number: int, row: Any) -> bytes:
    if not isinstance(row, Mapping):
        raise ConfigError(
            key,
            f"row {number} is a {type(row).__name__}, not a dict; write rows such as "
            '{"question": "…", "answer": "…"} (of a pandas table: table.to_dict("records"))',
        )
    for name, value in row.items():
        try:
            msgspec.json.encode(value, enc_hook=_plain)
        except (TypeError, NotImplementedError, msgspec.MsgspecError) as error:
            raise ConfigError(
                key, f"row {number}: the field {name!r} is a {type(value).__name__}, which is not JSON ({error})"
            ) from error
    return msgspec.json.encode(dict(row), enc_hook=_plain) + b"\n"


def _plain(value: Any) -> Any:
    """Numbers and arrays of numpy, and what else converts itself in their way."""
    convert = getattr(value, "tolist", None)
    if convert is None or isinstance(value, bytes):
        raise TypeError(f"{type(value).__name__} cannot be written")
    return convert()


def keep_rows(config: RunConfig, folder: Path) -> RunConfig:
    """Write the rows of a config to the folder of its run; the config then names the files, relative to the folder."""
    tasks = dict(config.tasks)
    for name, task in config.tasks.items():
        kept: dict[str, str] = {}
        for key, given, suffix in (("prompts", task.prompts, ""), ("eval_prompts", task.eval_prompts, "-eval")):
            if isinstance(given, Rows):
                place = f"{FOLDER}/{re.sub(r'[^A-Za-z0-9_.-]', '-', name)}{suffix}.jsonl"
                _keep(folder / place, given.lines, f"tasks.{name}.{key}")
                kept[key] = RUN_FOLDER + place
        tasks[name] = task.model_copy(update=kept)
    return config.model_copy(update={"tasks": tasks})


def _keep(file: Path, lines: bytes, key: str) -> None:
    if file.is_file():
        if file.read_bytes() != lines:
            raise ConfigError(key, f"differs from the rows that the run was started with, which are in {file}")
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(lines)


def located(config: RunConfig, folder: Path) -> RunConfig:
    """The config of a run with the paths of its prompts below `folder`, wherever that is now."""
    tasks = {}
    for name, task in config.tasks.items():
        paths = {
            key: str(folder / given.removeprefix(RUN_FOLDER))
            for key, given in (("prompts", task.prompts), ("eval_prompts", task.eval_prompts))
            if isinstance(given, str) and given.startswith(RUN_FOLDER)
        }
        tasks[name] = task.model_copy(update=paths)
    return config.model_copy(update={"tasks": tasks})
