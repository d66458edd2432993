"""Factory paths of classes and functions, by which every process can import them (`ports.factory`)."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollart.ports.factory import SESSION, keep_local, load
from rollart.types.errors import RequestError

REMEDY = "Workers import it by name: define it as a class or function at the top level of a file."


def factory_path(target: Callable[..., Any] | str) -> str:
    """Path of a class or function; paths are returned unchanged. Objects that cannot be imported by name are refused.

    >>> from fractions import Fraction
    >>> factory_path(Fraction)
    'fractions:Fraction'
    """
    if isinstance(target, str):
        return target
    module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", None)
    if not (callable(target) and module and name):
        raise RequestError(f"{target!r} is neither a class nor a function. {REMEDY}")
    if "<" in name:  # "<lambda>", or "outer.<locals>.inner"
        raise RequestError(f"{name} of {module} is a lambda or defined inside a function. {REMEDY}")
    if module != "__main__":
        path = f"{module}:{name}"
        if load(path) is not target:
            raise RequestError(f"{path} is a different object: the module has another one of that name. {REMEDY}")
        return path
    path = f"{_main(name)}:{name}"
    found = load(path)
    if path.startswith(f"{SESSION}:") and found is not target:
        raise RequestError(f"{name} was redefined in this session after it was passed. Pass the new one.")
    return path


def tool_path(target: Callable[..., Any] | str) -> str:
    """The same for a tool, which may also be defined inside a function: its path is then good in this process only."""
    name = getattr(target, "__qualname__", "")
    if callable(target) and "<locals>" in name and "<lambda>" not in name:
        return keep_local(target)
    return factory_path(target)


def _main(name: str) -> str:
    """Name of `__main__` for workers: its module if started as one, else its file, else this session."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return str(spec.name)
    file = getattr(main, "__file__", None)
    if file is None or not Path(file).is_file():
        return SESSION
    if not file.endswith(".py"):
        raise RequestError(f"{name} is in {file}, which cannot be imported: give the file a name that ends in .py")
    return str(Path(file).resolve())
