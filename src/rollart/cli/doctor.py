"""`rollart doctor`: what this machine, or every node of a cluster, has and lacks, and what to do about it."""

import json as jsonlib
import os
import platform
import shutil
import socket
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import typer
from rich.console import Console
from rich.markup import escape

from rollart.app.cluster_doctor import (
    LEAST_DISK_BYTES,
    LEAST_MEMORY_BYTES,
    LEAST_SHARED_BYTES,
    examine_cluster,
    problems,
)
from rollart.app.running import RuntimeKind, require
from rollart.backends.native.kernels import CannotCompile, cache_folder, compiled
from rollart.backends.sandboxes.bubblewrap import BubblewrapSandboxes
from rollart.cli.render import show_health
from rollart.cli.train import config_file
from rollart.config.load import check, load_toml
from rollart.config.schema import RunConfig
from rollart.types.errors import RequestError, SandboxFault, SandboxUnavailable
from rollart.types.sandboxes import SandboxSpec

PACKAGES = {
    "torch": ("train", True),
    "transformers": ("train", True),
    "tokenizers": ("train", True),
    "gymnasium": ("train", True),
    "ray": ("ray", False),
    "peft": ("lora", False),
    "uvicorn": ("serve", False),
    "starlette": ("serve", False),
    "vllm": ("vllm", False),
}
"""The extra of rollart that installs each package, and whether `rollart train` needs it."""
MARKS = {"ok": "[green]ok[/]  ", "note": "[yellow]note[/]", "bad": "[red]bad[/] "}


class Finding(NamedTuple):
    """`ok`: fine; `note`: an optional part is missing; `bad`: training will not work, with a remedy."""

    mark: str
    what: str
    found: str


def doctor(
    config: Annotated[
        str | None, typer.Argument(help="With --address: check the interpreters of this config's pools too.")
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="Check every node of a Ray cluster: HOST:PORT of its head, or auto.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print only one JSON object on stdout.")] = False,
) -> None:
    """Check this machine, or every node of a cluster: versions, memory, ports, GPUs, clocks; what is missing, and
    how to install it.

    Exits with 1 if `rollart train` cannot work here or there.

    Example: rollart doctor --address auto
    """
    if address is not None:
        raise typer.Exit(_doctor_cluster(address, config, json=json))
    if config is not None:
        raise RequestError("a config is checked against a cluster; add --address")
    findings = list(examine())
    if json:
        sys.stdout.write(jsonlib.dumps({finding.what: finding._asdict() for finding in findings}) + "\n")
    else:
        console = Console(highlight=False)
        for finding in findings:
            console.print(f"{MARKS[finding.mark]}  {finding.what:<14} {escape(finding.found)}", soft_wrap=True)
    if any(finding.mark == "bad" for finding in findings):
        raise typer.Exit(1)


def _doctor_cluster(address: str, config: str | None, *, json: bool) -> int:
    """Print the health of every node; the exit code."""
    require(RuntimeKind.RAY)
    checked = None if config is None else check(RunConfig, load_toml(config_file(config)))
    healths = examine_cluster(address, checked)
    bad, notes = problems(healths, "bad"), problems(healths, "note")
    if json:
        found = {"nodes": healths, "problems": bad, "notes": notes}
        sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
    else:
        show_health(Console(highlight=False), healths, bad, notes)
    return 1 if bad else 0


def examine() -> Iterator[Finding]:
    yield Finding("ok", "rollart", metadata.version("rollart"))
    yield Finding("ok", "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    for package, (extra, needed) in PACKAGES.items():
        yield _package(package, extra, needed=needed)
    yield from _devices()
    yield _kernels()
    yield from _sandboxes()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Finding("ok", "cores", f"{cores} available to this process")
    memory_gb = _memory_gb()
    if memory_gb is not None:
        yield _enough("memory", memory_gb, LEAST_MEMORY_BYTES, "close other programs, or train a smaller model")
    shared = Path("/dev/shm")
    if shared.is_dir():
        remedy = "weights are passed through it: mount a larger one (docker: --shm-size=1g)"
        yield _enough("shared memory", shutil.disk_usage(shared).free / 1e9, LEAST_SHARED_BYTES, remedy)
    disk_gb = shutil.disk_usage(Path.cwd()).free / 1e9
    yield _enough("disk", disk_gb, LEAST_DISK_BYTES, "free space, or use --out elsewhere")
    yield _loopback()


def _package(name: str, extra: str, *, needed: bool) -> Finding:
    try:
        return Finding("ok", name, metadata.version(name))
    except metadata.PackageNotFoundError:
        mark = "bad" if needed else "note"
        return Finding(mark, name, f"missing; install it with: pip install 'rollart[{extra}]'")


def _devices() -> Iterator[Finding]:
    try:
        import torch
    except ImportError as error:
        if error.name != "torch":  # installed but broken; a missing torch was reported above
            yield Finding("bad", "device", f"torch cannot be imported: {error}; reinstall it")
        return
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    yield Finding("ok", "device", ", ".join(names) if names else "CPU only; enough for the quickstart")


def _kernels() -> Finding:
    """Compiled kernels that speed up CPUs; GPUs do not need them."""
    try:
        return Finding("ok", "kernels", f"compiled for this processor: {compiled(cache_folder())}")
    except (CannotCompile, OSError) as error:
        return Finding("note", "kernels", f"none, so a CPU is slower than it could be: {error}")


def _sandboxes() -> Iterator[Finding]:
    """What isolates and limits the commands of agents here; only tasks that run code need it."""
    try:
        with BubblewrapSandboxes(warm=0) as sandboxes:
            sandboxes.create(SandboxSpec()).close()
            found = sandboxes.mechanisms()
    except (SandboxUnavailable, SandboxFault) as error:
        yield Finding("note", "sandboxes", str(error))
        return
    for mechanism in found:
        yield Finding("ok" if mechanism.in_force else "note", f"sandbox: {mechanism.part}", mechanism.by)


def _memory_gb() -> float | None:
    meminfo = Path("/proc/meminfo")
    if not meminfo.is_file():
        return None
    fields = dict(line.split(":", 1) for line in meminfo.read_text(encoding="ascii").splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024 / 1e9


def _enough(what: str, have_gb: float, least_bytes: int, remedy: str) -> Finding:
    least_gb = least_bytes / 1e9
    if have_gb >= least_gb:
        return Finding("ok", what, f"{have_gb:.1f} GB free")
    return Finding("bad", what, f"{have_gb:.2f} GB free, {least_gb:g} GB needed: {remedy}")


def _loopback() -> Finding:
    """Connections of worker processes."""
    try:
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            server.listen()
            with socket.create_connection(server.getsockname(), timeout=2.0):
                pass
    except OSError as error:
        return Finding("bad", "ports", f"no connection over 127.0.0.1 ({error}); check the firewall or the sandbox")
    return Finding("ok", "ports", "connections over 127.0.0.1 work")
