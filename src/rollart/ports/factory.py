"""Factory paths: `package.module:callable` names what to build, so that another process can build the same thing."""

import importlib
from collections.abc import Callable
from typing import Any

from rollart.types.errors import RequestError


def load(path: str) -> Callable[..., Any]:
    """The callable that a path names; the object may be nested (`package.module:Class.method`).

    >>> load("math:sqrt")(9.0)
    3.0
    """
    module_name, colon, name = path.partition(":")
    if not (colon and module_name and name):
        raise RequestError(f"{path!r} is not a factory path: write it as 'package.module:callable'")
    try:
        target: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise RequestError(
            f"factory {path!r}: cannot import {module_name!r} ({error}). "
            "Check the spelling, and that the package is installed where the worker runs."
        ) from error
    for part in name.split("."):
        if not hasattr(target, part):
            raise RequestError(
                f"factory {path!r}: {module_name!r} has no {name!r}. Check the spelling of the part after the colon."
            )
        target = getattr(target, part)
    if not callable(target):
        raise RequestError(
            f"factory {path!r} names a {type(target).__name__}, which cannot be called. Name a class or a function."
        )
    return target  # type: ignore[no-any-return]
