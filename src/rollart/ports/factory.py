"""Factory paths: names by which another process can build the same object.

`package.module:callable`, or `path/to/file.py:callable` for a file outside of any package, such as a user's script. A
file is executed once per process, under a `__name__` of its own: code under `if __name__ == "__main__":` is skipped, as
on import. `__main__:callable` was defined in a notebook or an interactive session and exists only in that process.

`path/to/file.toml:table` is made from settings instead of code: `factory` of that table is the path of a callable,
which gets the other keys and returns what the path stands for.
"""

import importlib
import importlib.util
import itertools
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from rollart.config.suggest import did_you_mean
from rollart.types.errors import RequestError

SESSION = "__main__"
FACTORY = "factory"
LOCAL = "__local__"
"""Place of objects that only this process has, such as functions defined inside a function."""
_locals: dict[str, Callable[..., Any]] = {}
imports = threading.RLock()
"""Held while a worker's code is imported, because workers of one process are built concurrently.

It ensures that a file is executed once. And when imports of two threads deadlock, Python continues with a partially
initialised module, which fails with an `ImportError`.
"""
_running = threading.local()
"""`file`: the file that this thread is executing."""


_moved: list[tuple[Path, Path]] = []


def moved(before: Path, after: Path) -> None:
    """Map file paths below `before` to `after` in this process, which runs on another machine."""
    _moved.append((before, after))


def moves() -> list[tuple[str, str]]:
    """What `moved` was called with, for a process that this one starts."""
    return [(str(before), str(after)) for before, after in _moved]


def keep_local(target: Callable[..., Any]) -> str:
    """A path by which workers of this process find an object that cannot be imported."""
    name = target.__name__
    number = next(number for number in itertools.count() if _locals.get(f"{name}/{number}", target) is target)
    _locals[f"{name}/{number}"] = target
    return f"{LOCAL}:{name}/{number}"


def load(path: str) -> Callable[..., Any]:
    """Import the callable of a path; it may be nested (`package.module:Class.method`).

    >>> load("math:sqrt")(9.0)
    3.0
    """
    place, colon, name = path.rpartition(":")
    if not (colon and place and name):
        raise RequestError(f"{path!r} is not a factory path: write it as 'package.module:callable'")
    if place == LOCAL:
        if name not in _locals:
            raise RequestError(
                f"{name.partition('/')[0]} was defined inside a function of another process; give the task again, with "
                "its tools, or define it at the top level of a file"
            )
        return _locals[name]
    if place.endswith(".toml"):
        return _configured(path, Path(place), name)
    target: Any = _file(path, Path(place)) if place.endswith(".py") else _module(path, place)
    for part in name.split("."):
        if not hasattr(target, part):
            raise RequestError(
                f"factory {path!r}: {place!r} has no {name!r}{did_you_mean(part, dir(target))}. {_remedy(place)}"
            )
        target = getattr(target, part)
    if not callable(target):
        raise RequestError(
            f"factory {path!r} is a {type(target).__name__}, which cannot be called. Name a class or a function."
        )
    return target  # type: ignore[no-any-return]


def _remedy(place: str) -> str:
    if place == SESSION:
        return "It was defined in a notebook or an interactive session: define it in this one first."
    return "Check the spelling of the part after the colon."


def file_being_loaded() -> Path | None:
    """File that `load` is executing in this thread; set while the caller's own file is being imported."""
    return getattr(_running, "file", None)


def _module(path: str, name: str) -> ModuleType:
    try:
        with imports:
            return importlib.import_module(name)
    except ImportError as error:
        raise RequestError(
            f"factory {path!r}: cannot import {name!r} ({error}). "
            "Check the spelling, and that the package is installed where the worker runs."
        ) from error
    except Exception as error:
        raise RequestError(
            f"factory {path!r}: importing {name!r} failed ({type(error).__name__}: {error}). Fix the module."
        ) from error


def settings_of(file: Path, table: str) -> tuple[str, dict[str, Any]]:
    """The factory path, and the settings for it, in a table of a TOML file."""
    toml = importlib.import_module("tomllib")  # here: Python 3.10, which may play environments, does not have it
    try:
        tables = toml.loads(_here(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError(
            f"factory '{file}:{table}': {file} cannot be read ({error}). Check the path and the file."
        ) from error
    settings = tables.get(table)
    if not isinstance(settings, dict):
        raise RequestError(f"factory '{file}:{table}': {file} has no table [{table}]{did_you_mean(table, tables)}")
    factory = settings.pop(FACTORY, None)
    if not isinstance(factory, str):
        raise RequestError(
            f"factory '{file}:{table}': [{table}] does not name its `{FACTORY}`, 'package.module:callable'"
        )
    return factory, settings


def _configured(path: str, file: Path, table: str) -> Callable[..., Any]:
    factory, settings = settings_of(file, table)
    try:
        made = load(factory)(**settings)
    except (RequestError, TypeError) as error:
        raise RequestError(f"factory {path!r}: {error}") from error
    if not callable(made):
        raise RequestError(f"factory {path!r}: {factory} made a {type(made).__name__}, which cannot be called.")
    return made  # type: ignore[no-any-return]


def _here(file: Path) -> Path:
    """Where a file is in this process."""
    for there, here in _moved:
        if file.is_relative_to(there):
            file = here / file.relative_to(there)
    return file.resolve()


def _file(path: str, file: Path) -> ModuleType:
    file = _here(file)
    with imports:
        known = sys.modules.get(str(file))
        if known is not None:
            return known
        spec = importlib.util.spec_from_file_location(str(file), file)
        if spec is None or spec.loader is None or not file.is_file():
            raise RequestError(f"factory {path!r}: there is no file {file}. Check the part before the colon.")
        module = sys.modules[str(file)] = importlib.util.module_from_spec(spec)
        if str(file.parent) not in sys.path:
            sys.path.append(str(file.parent))  # as for a script, so that it can import its siblings
        before, _running.file = file_being_loaded(), file
        try:
            spec.loader.exec_module(module)
        except BaseException as error:
            del sys.modules[str(file)]
            if not isinstance(error, Exception) or isinstance(error, RequestError):
                raise
            raise RequestError(
                f"factory {path!r}: {file} cannot be loaded ({type(error).__name__}: {error}). Fix the file."
            ) from error
        finally:
            _running.file = before
        return module
