"""Factory paths name what to build, so that another process can build the same thing.

`package.module:callable`, or `path/to/file.py:callable` for a file that is no module of a package, such as a script of
the user's. A file is run once per process, under a `__name__` of its own: what stands under
`if __name__ == "__main__":` is left out, as when it is imported.
"""

import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from rollart.config.suggest import did_you_mean
from rollart.types.errors import RequestError

_files = threading.RLock()
"""Workers of one process load at the same time; a file is still run once."""
_running = threading.local()
"""`file`: the one that this thread runs."""


def load(path: str) -> Callable[..., Any]:
    """The callable that a path names; the object may be nested (`package.module:Class.method`).

    >>> load("math:sqrt")(9.0)
    3.0
    """
    place, colon, name = path.rpartition(":")
    if not (colon and place and name):
        raise RequestError(f"{path!r} is not a factory path: write it as 'package.module:callable'")
    target: Any = _file(path, Path(place)) if place.endswith(".py") else _module(path, place)
    for part in name.split("."):
        if not hasattr(target, part):
            raise RequestError(
                f"factory {path!r}: {place!r} has no {name!r}{did_you_mean(part, dir(target))}. "
                "Check the spelling of the part after the colon."
            )
        target = getattr(target, part)
    if not callable(target):
        raise RequestError(
            f"factory {path!r} names a {type(target).__name__}, which cannot be called. Name a class or a function."
        )
    return target  # type: ignore[no-any-return]


def file_being_loaded() -> Path | None:
    """The file that `load` runs in this thread at this moment: who asks is called by its top level."""
    return getattr(_running, "file", None)


def _module(path: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise RequestError(
            f"factory {path!r}: cannot import {name!r} ({error}). "
            "Check the spelling, and that the package is installed where the worker runs."
        ) from error
    except Exception as error:
        raise RequestError(
            f"factory {path!r}: importing {name!r} failed ({type(error).__name__}: {error}). Mend the module."
        ) from error


def _file(path: str, file: Path) -> ModuleType:
    file = file.resolve()
    with _files:
        known = sys.modules.get(str(file))
        if known is not None:
            return known
        spec = importlib.util.spec_from_file_location(str(file), file)
        if spec is None or spec.loader is None or not file.is_file():
            raise RequestError(f"factory {path!r}: there is no file {file}. Check the part before the colon.")
        module = sys.modules[str(file)] = importlib.util.module_from_spec(spec)
        if str(file.parent) not in sys.path:
            sys.path.append(str(file.parent))  # as for a script, so that it finds its neighbours
        before, _running.file = file_being_loaded(), file
        try:
            spec.loader.exec_module(module)
        except BaseException as error:
            del sys.modules[str(file)]
            if not isinstance(error, Exception) or isinstance(error, RequestError):
                raise
            raise RequestError(
                f"factory {path!r}: {file} cannot be loaded ({type(error).__name__}: {error}). Mend the file."
            ) from error
        finally:
            _running.file = before
        return module
