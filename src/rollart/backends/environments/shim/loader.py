"""First code in an interpreter of its own: makes the modules that were sent importable, and starts `main`.

It is executed from its source, with only the standard library, before anything else is imported.

    worker ──► stdin:  one line with the setup as JSON, then frames of commands
    worker ◄── stdout: frames of answers; whatever libraries print goes to stderr instead

A small process beside it watches stdin: when the worker is gone, however it ended, it kills the whole process group,
even if this interpreter hangs in C code.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import select
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

GRACE_S = 2.0
"""Time to close environments in order once stdin has closed."""
TITLE_BYTES = 15
"""What `top` shows of a name."""


class SentModules(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Finds and loads modules from their sources; packages are extended by those of an installed rollart."""

    def __init__(self, sources: dict[str, str], packages: list[str]) -> None:
        self._sources = sources
        self._packages = packages
        installed = importlib.machinery.PathFinder.find_spec("rollart")
        self._installed = list(installed.submodule_search_locations or ()) if installed is not None else []

    def find_spec(self, fullname: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._sources:
            return None
        spec = importlib.util.spec_from_loader(fullname, self, is_package=fullname in self._packages)
        if spec is not None and fullname in self._packages:
            below = fullname.split(".")[1:]
            spec.submodule_search_locations = [os.path.join(folder, *below) for folder in self._installed]
        return spec

    def get_source(self, fullname: str) -> str:
        return self._sources[fullname]

    def is_package(self, fullname: str) -> bool:
        return fullname in self._packages


def start(stream: IO[bytes]) -> None:
    """Run until stdin closes. `stream` reads it."""
    answers = os.dup(1)  # of its own, and not inherited: what libraries and their processes print is no answer
    os.dup2(2, 1)
    watch(os.dup(0), sys.argv[-1])
    setup = json.loads(stream.readline())
    with suppress(OSError):
        Path("/proc/self/comm").write_bytes(sys.argv[-1].encode()[:TITLE_BYTES])
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    sys.path[:] = [path for path in sys.path if path] + setup["import_path"]
    sys.meta_path.insert(0, SentModules(setup["sources"], setup["packages"]))
    main = importlib.import_module("rollart.backends.environments.shim.main")
    main.run(stream, answers, setup)


def watch(stdin: int, title: str) -> None:
    """Start the process that kills the group when stdin has closed."""
    if os.fork():
        return
    with suppress(OSError):
        Path("/proc/self/comm").write_bytes(f"watch {title}".encode()[:TITLE_BYTES])
    os.closerange(0, stdin)
    os.closerange(stdin + 1, os.sysconf("SC_OPEN_MAX") if os.sysconf("SC_OPEN_MAX") < 4096 else 4096)
    hung_up = select.poll()
    hung_up.register(stdin, 0)
    hung_up.poll()
    select.select([], [], [], GRACE_S)
    os.killpg(0, signal.SIGKILL)
