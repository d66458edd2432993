"""From a class or function to the factory path under which every process finds it (`ports.factory`)."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollart.ports.factory import load
from rollart.types.errors import RequestError

REMEDY = "Workers load it by its name: write it as a class or function at the top level of a file."


def factory_path(target: Callable[..., Any] | str) -> str:
    """The path of a class or function; a path stays what it is. What has no name that others can use is refused.

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
        raise RequestError(f"{name} of {module} is made inside a function or is a lambda. {REMEDY}")
    if module != "__main__":
        path = f"{module}:{name}"
        if load(path) is not target:
            raise RequestError(f"{path} is not what was given: the module has something else of that name. {REMEDY}")
        return path
    path = f"{_main(name)}:{name}"
    load(path)
    return path


def _main(name: str) -> str:
    """What `__main__` is to other processes: a module if it was started as one, else its file."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return str(spec.name)
    file = getattr(main, "__file__", None)
    if file is None or not Path(file).is_file():
        raise RequestError(f"{name} was typed into a session that has no file. {REMEDY}")
    if not file.endswith(".py"):
        raise RequestError(f"{name} is in {file}, which cannot be imported: give the file a name that ends in .py")
    return str(Path(file).resolve())
