"""`rollart reward package`: a folder that a cloud deploys, with the function, what it needs, and how to deploy it.

The folder carries the function's source, the few modules of rollart that serve it (no torch, no Ray, no numpy), an
entry point, pinned requirements and a README. It does not need rollart to be installed: a package index need not have
this version, and 30 small modules start faster than the whole.
"""

import enum
import shutil
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from rollart.app.functions import package_texts as texts
from rollart.app.functions.closure import needs_of
from rollart.ports.factory import load
from rollart.ports.reward import kind_of
from rollart.types.errors import RequestError

RUNTIME = "rollart.app.functions.packaged"
MAX_BYTES = 250 * 2**20
"""Lambda's limit for a folder; used for all targets."""


class Target(enum.Enum):
    """Where a package runs."""

    FUNCTIONS_FRAMEWORK = "functions-framework"
    """Cloud Run and Cloud Run functions, Knative, or any host of Google's functions-framework."""
    LAMBDA = "lambda"
    """AWS Lambda, behind a function URL or invoked directly."""
    ASGI = "asgi"
    """Any ASGI server or container host."""


class Layout(NamedTuple):
    """What a target has besides function and runtime."""

    entry: str
    """File of the entry point."""
    call: str
    """The line that makes the entry point."""
    requirements: tuple[str, ...]
    files: dict[str, str]


LAYOUTS = {
    Target.FUNCTIONS_FRAMEWORK: Layout(
        "main.py",
        "score = packaged.functions_framework(__file__, {function!r})",
        ("functions-framework==3.10.2",),
        {
            "README.md": texts.FRAMEWORK_README,
            "Dockerfile": texts.FRAMEWORK_DOCKERFILE,
            "service.yaml": texts.KNATIVE_SERVICE,
        },
    ),
    Target.LAMBDA: Layout(
        "lambda_function.py",
        "lambda_handler = packaged.aws_lambda(__file__, {function!r})",
        (),
        {"README.md": texts.LAMBDA_README},
    ),
    Target.ASGI: Layout(
        "main.py",
        "app = packaged.asgi(__file__, {function!r})",
        ("uvicorn==0.54.0",),
        {"README.md": texts.ASGI_README, "Dockerfile": texts.ASGI_DOCKERFILE},
    ),
}


class Packaged(NamedTuple):
    folder: Path
    files: tuple[str, ...]
    bytes: int
    requirements: tuple[str, ...]


def package(function: str, target: Target, out: Path, include: Sequence[Path] = ()) -> Packaged:
    """Write the package of a function into a new folder. `include`: more files or folders that it reads."""
    kind_of(load(function), function)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RequestError(f"{out} exists already; name a new folder with --out, or remove it")
    place, _, name = function.rpartition(":")
    layout = LAYOUTS[target]
    needs = needs_of(function, [RUNTIME])
    files = needs.files | _included(include)
    clash = next((file for file in (layout.entry, *layout.files, "requirements.txt") if file in files), None)
    if clash:
        raise RequestError(f"the function needs a file {clash}, which is that of the package; give it another name")
    size = sum(file.stat().st_size for file in files.values())
    if size > MAX_BYTES:
        raise RequestError(
            f"the package would have {size / 1e6:.0f} MB, more than {MAX_BYTES / 1e6:.0f}; leave files out"
        )
    path = f"{Path(place).name}:{name}" if place.endswith((".py", ".toml")) else function
    requirements = tuple(sorted({*needs.requirements, *layout.requirements}))
    values = {
        "function": path,
        "name": name.replace("_", "-").replace(".", "-").lower(),
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "python_short": f"{sys.version_info.major}{sys.version_info.minor}",
        "rollart": metadata.version("rollart"),
    }
    written = {file: texts.filled(text, values) for file, text in layout.files.items()}
    written[layout.entry] = texts.ENTRY + layout.call.format(function=path) + "\n"
    written["requirements.txt"] = "".join(f"{each}\n" for each in requirements)
    for where, source in files.items():
        (out / where).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, out / where)
    for where, text in written.items():
        (out / where).write_text(text, encoding="utf-8")
    return Packaged(out, tuple(sorted({*files, *written})), size, requirements)


def _included(paths: Sequence[Path]) -> dict[str, Path]:
    """Files below these paths, by their place in the package: beside the function, folders with their name."""
    found: dict[str, Path] = {}
    for path in paths:
        if not path.exists():
            raise RequestError(f"--include {path}: there is no such file or folder")
        inside = [path] if path.is_file() else [file for file in sorted(path.rglob("*")) if file.is_file()]
        found |= {file.relative_to(path.parent).as_posix(): file for file in inside}
    return found
