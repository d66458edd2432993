"""The modules that travel to an interpreter of its own, as source.

Invariant: they import each other, the standard library, and, inside functions, the library that they adapt.
"""

import importlib.util
from functools import cache
from pathlib import Path

SHIM = "rollart.backends.environments.shim"
LOADER = f"{SHIM}.loader"
PACKAGES = (
    "rollart",
    "rollart.backends",
    "rollart.backends.environments",
    SHIM,
    "rollart.config",
    "rollart.ports",
    "rollart.tasks",
    "rollart.tasks.libraries",
    "rollart.types",
)
MODULES = (
    "rollart.backends.environments.checked",
    "rollart.backends.environments.gym",
    f"{SHIM}.main",
    f"{SHIM}.player",
    "rollart.config.held_out",
    "rollart.config.suggest",
    "rollart.ports.environment",
    "rollart.ports.factory",
    "rollart.tasks.split",
    "rollart.types.chat",
    "rollart.types.errors",
    "rollart.types.failures",
)
LIBRARIES = "rollart.tasks.libraries"


@cache
def shipped_sources() -> dict[str, str]:
    """Source of every module by name."""
    sources = {name: source_of(name) for name in (*PACKAGES, *MODULES)}
    sources["rollart"] = source_of(f"{SHIM}.package")
    for file in sorted(_file_of(LIBRARIES).parent.glob("*.py")):
        if file.stem != "__init__":
            sources[f"{LIBRARIES}.{file.stem}"] = file.read_text(encoding="utf-8")
    return sources


def source_of(module: str) -> str:
    return _file_of(module).read_text(encoding="utf-8")


def _file_of(module: str) -> Path:
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None, f"{module} is part of rollart"  # noqa: PT018 - both or neither
    return Path(spec.origin)
