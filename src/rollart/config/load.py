"""Load and validate a config from TOML and `--set` overrides. Every problem is a `ConfigError` with the key's path."""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError

from rollart.config.suggest import did_you_mean
from rollart.types.errors import ConfigError

M = TypeVar("M", bound=BaseModel)

RENAMED = {
    "deadlines.engine_joins_s": (
        "model_loads_s for the start of engines and the trainer, worker_starts_s for that of other workers, and "
        "no_engine_s for how long a run may be without engines"
    )
}
"""Keys of earlier versions, and their replacements."""


def load_toml(path: Path) -> dict[str, Any]:
    """Parse a TOML file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError("", f"{path}: no such config file") from None
    except IsADirectoryError:
        raise ConfigError("", f"{path} is a folder; give the path of a config file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("", f"{path} is not valid TOML: {error}") from None
    except OSError as error:
        raise ConfigError("", f"{path} cannot be read: {error.strerror}") from None


def override(data: Mapping[str, Any], assignments: Sequence[str]) -> dict[str, Any]:
    """Apply `key.path=value` assignments to a copy of `data`.

    Values are TOML (`3`, `true`, `"text"`, `[1, 2]`); a value that is not valid TOML is taken as text.
    """
    out = _copy(data)
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        keys = path.strip().split(".")
        if not equals or not all(keys):
            raise ConfigError("", f"--set {assignment!r}: write key=value, such as --set batch.group_size=4")
        table = out
        for depth, key in enumerate(keys[:-1]):
            table = table.setdefault(key, {})
            if not isinstance(table, dict):
                raise ConfigError(".".join(keys[: depth + 1]), f"is not a table, so --set {assignment!r} cannot apply")
        table[keys[-1]] = _value(text.strip())
    return out


def check(model: type[M], data: Mapping[str, Any]) -> M:
    """Validate `data` as a `model`; the first problem is raised as a `ConfigError`, unknown keys before others."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        # A missing key may be a misspelt one, in which case the typo is the real problem.
        first = next((problem for problem in problems if problem["type"] == "extra_forbidden"), problems[0])
        loc = _keys_of(data, first["loc"])
        raise _explained(model, loc, first["type"], first["msg"], first.get("input")) from None


def _keys_of(data: Any, loc: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """`loc` without parts that the user did not write: union branches (`model.str`), the index of a single table."""
    here = data
    keys: list[int | str] = []
    for part in loc:
        if isinstance(here, Mapping):
            if isinstance(part, int):
                continue  # a single table in place of a list
            here = here.get(part)
        elif isinstance(here, Sequence) and not isinstance(here, str):
            if not isinstance(part, int):
                continue  # the branch of a union
            here = here[part] if part < len(here) else None
        else:
            break
        keys.append(part)
    return tuple(keys)


def _explained(
    model: type[BaseModel], loc: tuple[int | str, ...], kind: str, message: str, given: object
) -> ConfigError:
    path = ".".join(str(part) for part in loc)
    if kind == "extra_forbidden":
        if path in RENAMED:
            return ConfigError(path, f"is now called {RENAMED[path]}")
        known = _keys_at(model, loc[:-1])
        return ConfigError(path, f"unknown key{did_you_mean(str(loc[-1]), known)}")
    if kind == "missing":
        return ConfigError(path, "is missing")
    if kind == "value_error":
        # Raised by one of our own validators: its message is complete.
        return ConfigError(path, message.removeprefix("Value error, "))
    words = message[:1].lower() + message[1:]
    if kind in ("enum", "literal_error") and isinstance(given, str):
        options = [word.strip(" '") for word in message.partition("should be ")[2].replace(" or ", ",").split(",")]
        return ConfigError(path, f"{words}, not {given!r}{did_you_mean(given, options)}")
    return ConfigError(path, f"{words}, not {given!r}")


def _keys_at(model: type[BaseModel], loc: tuple[int | str, ...]) -> list[str]:
    """Keys that are valid in the table at `loc`."""
    here: Any = model
    for part in loc:
        if isinstance(here, type) and issubclass(here, BaseModel):
            field = here.model_fields.get(str(part))
            here = None if field is None else field.annotation
        else:
            here = _inside(here)
    if get_origin(here) is tuple:  # a single table in place of a list
        here = _inside(here)
    return list(here.model_fields) if isinstance(here, type) and issubclass(here, BaseModel) else []


def _inside(kind: Any) -> Any:
    """Value type of a mapping such as dict[str, TaskSettings], or item type of a tuple."""
    kinds = [part for part in get_args(kind) if part is not ...]
    return kinds[-1] if kinds else None


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _copy(data: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copy(value) if isinstance(value, Mapping) else value for key, value in data.items()}
