"""Workers that run with a different interpreter, and so with different packages, than the controller.

Invariants: an interpreter that passes `check_interpreter` has the same Python (major.minor), Ray and rollart versions
as the controller, which the messages between them rely on. All other packages may differ.
"""

import importlib
import importlib.metadata
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from rollart.types.errors import RequestError

PROBE_TIMEOUT_S = 120.0
"""Generous, because the first import of Ray from a cold disk may take long."""
PROBE = """
import importlib.metadata, importlib.util, json, sys
found = {"python": list(sys.version_info[:2]), "ray": "", "rollart": "", "problem": ""}
if found["python"] == json.loads(sys.argv[1]):
    try:
        found["ray"] = importlib.metadata.version("ray")
        import rollart
        found["rollart"] = rollart.__version__
        import rollart.distributed.ray_process
    except ImportError as error:
        found["problem"] = str(error)
found["missing"] = [name for name in sys.argv[2:] if importlib.util.find_spec(name) is None]
print("\\n" + json.dumps(found))
"""


def check_interpreter(python: str, *needed: str) -> None:
    """Refuse an interpreter that cannot run workers of this controller, or lacks one of the modules in `needed`.

    Runs it once. The `RequestError` explains what differs and how to fix it.
    """
    found = _probe(python, needed)
    ours, theirs = _number(sys.version_info[:2]), _number(found["python"])
    if ours != theirs:
        raise RequestError(
            f"{python} is Python {theirs} and the controller runs with {ours}; Ray needs the same on both sides"
        )
    ray = importlib.metadata.version("ray")
    if found["ray"] != ray:
        there = f"has Ray {found['ray']}" if found["ray"] else "has no Ray"
        raise RequestError(
            f"{python} {there} and the controller has {ray}; install the same: {_pip(python)} ray=={ray}"
        )
    if not found["rollart"]:
        raise RequestError(
            f"{python} cannot import rollart ({found['problem']}); install it there: "
            f"{_pip(python)} --no-deps {_own_source()}"
        )
    if found["rollart"] != own_version():
        raise RequestError(
            f"{python} has rollart {found['rollart']} and the controller has {own_version()}; install the same: "
            f"{_pip(python)} --no-deps {_own_source()}"
        )
    if found["problem"]:
        raise RequestError(f"{python} cannot run workers of rollart: {found['problem']}; install what is missing there")
    if found["missing"]:
        raise RequestError(f"{python} has no {', '.join(found['missing'])}; install it there, or use another")


def _probe(python: str, needed: tuple[str, ...]) -> dict[str, Any]:
    command = [python, "-c", PROBE, json.dumps(sys.version_info[:2]), *needed]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONWARNINGS": "ignore"},
        )
        found: dict[str, Any] = json.loads((done.stdout.splitlines() or [""])[-1])
    except subprocess.TimeoutExpired:
        raise RequestError(f"{python} gave no answer within {PROBE_TIMEOUT_S:g} s; try it by hand") from None
    except OSError as error:
        raise RequestError(f"{python} cannot be started: {error}") from error
    except ValueError:
        output = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise RequestError(f"{python} does not run as a Python interpreter; its output: {output}") from None
    return found


def _number(version: Any) -> str:
    return ".".join(map(str, version))


def _pip(python: str) -> str:
    return f"{shlex.quote(python)} -m pip install"


def own_version() -> str:
    """Version of this rollart; looked up by name, because the package itself is above this one."""
    return str(importlib.import_module("rollart").__version__)


def _own_source() -> str:
    """Argument for pip to install this rollart: its checkout, if it runs from one."""
    checkout = Path(__file__).parents[3]
    return (
        f"-e {shlex.quote(str(checkout))}" if (checkout / "pyproject.toml").is_file() else f"rollart=={own_version()}"
    )
