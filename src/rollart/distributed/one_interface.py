"""Keeps the servers of Ray and torch to one interface of this machine: that of the cluster.

Ray listens on loopback or on all interfaces, torch's store on all of them, and neither has a setting for it. A small
library replaces `bind` in their code (`bind.c`): a wildcard address becomes that of the cluster. Other code of the same
process is not affected. The library is compiled on first use and cached; without a C compiler nothing is started.

    node:        variables(address) in the environment of `ray start`; Ray's processes and the workers inherit them
    worker:      remove_variables(), so that what it starts is not affected
    controller:  bind_this_process(address), before it connects to Ray

`python -m rollart.distributed.one_interface HOST` prints the address of the interface that leads to a host.
"""

import ctypes
import hashlib
import ipaddress
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from rollart.types.errors import RequestError

SOURCE = Path(__file__).with_name("bind.c")
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O2", "-shared", "-fPIC")
LIBRARIES = ("-ldl",)
COMPILE_S = 60.0
ADDRESS = "ROLLART_BIND"
PRELOAD = "LD_PRELOAD"
PRELOAD_ON_WORKERS = "RAY_LD_PRELOAD_ON_WORKERS"


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def variables(address: str, inherited: Mapping[str, str]) -> dict[str, str]:
    """Environment of a node whose servers listen on `address` only. Nothing for loopback, which Ray keeps to itself."""
    if is_loopback(address):
        return {}
    preloaded = [str(library()), *filter(None, [inherited.get(PRELOAD)])]
    return {ADDRESS: address, PRELOAD: ":".join(preloaded), PRELOAD_ON_WORKERS: "1"}


def remove_variables(environment: MutableMapping[str, str]) -> None:
    """Undo `variables`; what the process itself has loaded stays in force."""
    if environment.pop(ADDRESS, None) is None:
        return
    environment.pop(PRELOAD_ON_WORKERS, None)
    _, _, others = environment.pop(PRELOAD, "").partition(":")
    if others:
        environment[PRELOAD] = others


def bind_this_process(address: str) -> None:
    """Servers that Ray and torch start in this process listen on `address` only. They have to be imported already."""
    if is_loopback(address) or os.environ.get(ADDRESS):
        return
    bind_to = ctypes.CDLL(str(library())).rollart_bind_to
    if bind_to(address.encode()) < 1:
        raise RequestError(f"cannot keep Ray's servers of this process to {address}: this build of Ray is not known")


def address_towards(host: str, port: int) -> str:
    """Address of this machine's interface that leads to `host`."""
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)  # a datagram socket: nothing is sent
        address: str = probe.getsockname()[0]
    return address


def library() -> Path:
    """The compiled `bind.c`, from the user's cache folder. Safe for concurrent processes."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollart"
    compiler = os.environ.get("CC") or next(filter(shutil.which, COMPILERS), None)
    identity = "\n".join((SOURCE.read_text(encoding="utf-8"), compiler or "", *FLAGS, os.uname().machine))
    compiled = folder / f"bind-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
    if compiled.exists():
        return compiled
    if compiler is None:
        raise RequestError(
            f"no C compiler ({', '.join(COMPILERS)}), which is needed once to keep Ray to the cluster's interface; "
            "install one, or set CC"
        )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        draft = Path(scratch) / compiled.name
        command = [compiler, *FLAGS, str(SOURCE), "-o", str(draft), *LIBRARIES]
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_S, check=False)
        if done.returncode:
            raise RequestError(f"{' '.join(command)} failed: {done.stderr.strip()}")
        os.replace(draft, compiled)
    return compiled


if __name__ == "__main__":
    sys.stdout.write(address_towards(sys.argv[1], 1) + "\n")
