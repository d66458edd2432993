"""Self-examination of a cluster node for `rollart doctor --address`.

Sent by value, so that a node where rollart is missing answers too: standard library only, plain data in and out.

    ask    {"echo": [host, port], "interpreters": {path: [module, …]}}
    answer {"host", "python", "packages", "gpus", "memory_bytes", "disk_bytes", "shared_bytes", "link", "interpreters"}
"""

import json
import os
import platform
import shutil
import socket
import subprocess
import tempfile
import time
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("rollart", "ray", "torch")
ROUNDS = 8
"""Exchanges with the controller; the fastest one has the best estimate of the clock's offset."""
CONNECT_S = 10.0
INTERPRETER_S = 120.0
PROBE = """
import importlib.metadata, importlib.util, json, platform, sys
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
print("\\n" + json.dumps({
    "python": platform.python_version(),
    "packages": {name: version(name) for name in json.loads(sys.argv[1])},
    "missing": [name for name in json.loads(sys.argv[2]) if importlib.util.find_spec(name) is None],
}))
"""


def look(ask: dict[str, Any]) -> dict[str, Any]:
    """Everything about this node."""
    return {
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "gpus": gpu_count(),
        "memory_bytes": free_memory_bytes(),
        "disk_bytes": shutil.disk_usage(tempfile.gettempdir()).free,
        "shared_bytes": shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else None,
        "link": _link(*ask["echo"]),
        "interpreters": {path: _interpreter(path, modules) for path, modules in ask["interpreters"].items()},
    }


def _version(name: str) -> str:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return ""


def gpu_count() -> int:
    """Number of GPUs of the machine, whatever this process is allowed to use. Needs neither torch nor a context."""
    nvidia = Path("/proc/driver/nvidia/gpus")
    if nvidia.is_dir():
        return len(list(nvidia.iterdir()))
    amd = Path("/sys/class/kfd/kfd/topology/nodes")
    if not amd.is_dir():
        return 0
    sizes = [(node / "properties").read_text(encoding="ascii") for node in sorted(amd.iterdir())]
    return sum("simd_count 0\n" not in text for text in sizes)  # nodes without SIMD units are CPUs


def free_memory_bytes() -> int | None:
    """Memory that new processes of this machine may take."""
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _link(host: str, port: int) -> dict[str, Any]:
    """Connection to the controller: round trip and offset of this clock against its own, in seconds."""
    try:
        with socket.create_connection((host, port), timeout=CONNECT_S) as link:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link.settimeout(CONNECT_S)
            with link.makefile("rwb", buffering=0) as stream:
                rounds = [_exchange(stream) for _ in range(ROUNDS)]
    except (OSError, ValueError) as error:
        return {"problem": str(error) or type(error).__name__}
    trip_s, offset_s = min(rounds)
    return {"trip_s": trip_s, "offset_s": offset_s}


def _exchange(stream: Any) -> tuple[float, float]:
    before = time.time()
    began = time.perf_counter()
    stream.write(b"?")
    there = float(stream.readline())  # empty if the controller closed it
    trip_s = time.perf_counter() - began
    return trip_s, before + trip_s / 2 - there


def _interpreter(path: str, modules: list[str]) -> dict[str, Any]:
    """Another interpreter of this node, that of a pool."""
    if not (Path(path).is_file() and os.access(path, os.X_OK)):
        return {"problem": "there is no such executable file"}
    command = [path, "-c", PROBE, json.dumps(PACKAGES), json.dumps(modules)]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=INTERPRETER_S,
            check=False,
            stdin=subprocess.DEVNULL,
            env=environment,
        )
        found: dict[str, Any] = json.loads((done.stdout.splitlines() or [""])[-1])
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"problem": f"it does not run: {error}"}
    except ValueError:
        return {"problem": f"it does not run as a Python interpreter: {done.stderr.strip()[-200:] or 'no output'}"}
    return found
