"""`rollart bench sandbox`: how fast sandboxes are created, reset and used."""

import json as jsonlib
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from rich.console import Console

from rollart.backends.sandboxes.bubblewrap import BubblewrapSandboxes
from rollart.bench.common import say
from rollart.types.errors import RequestError
from rollart.types.sandboxes import Limits, SandboxSpec

SPEC = SandboxSpec(limits=Limits(memory_mb=128, disk_mb=16, files=1000))
COMMAND = ("/bin/true",)


def sandbox(
    at_once: Annotated[int, typer.Option(help="Sandboxes that exist at the same time.")] = 64,
    count: Annotated[int, typer.Option(help="Sandboxes created in total; at least --at-once.")] = 256,
    makers: Annotated[int, typer.Option(help="Creations at the same time.")] = 4,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout and nothing else.")] = False,
) -> None:
    """Create sandboxes from an empty pool, run a command in each, and reset them with a warm pool.

    created_per_s and create_…: from an empty pool; what a caller waits, pacing included, with as many callers as there
    may be sandboxes. warm_reset_…: what a reset takes if a sandbox is ready. command_…: /bin/true.

    Example: rollart bench sandbox --json
    """
    if not 1 <= at_once <= count or makers < 1:
        raise RequestError("--at-once must be between 1 and --count, and --makers positive")
    result = measure(at_once, count, makers)
    if json:
        sys.stdout.write(jsonlib.dumps(result) + "\n")
    else:
        for name, value in result.items():
            Console(highlight=False).print(f"{name:<28} {value}")


def measure(at_once: int, count: int, makers: int) -> dict[str, Any]:
    with TemporaryDirectory(prefix="rollart-bench-") as name:
        folder = Path(name)
        folder.chmod(0o711)
        with BubblewrapSandboxes(folder / "cold", warm=0, makers=makers) as sandboxes:
            sandboxes.create(SPEC).close()  # starts the launcher
            say(f"{count} sandboxes, {at_once} at once ...")
            cold = _cold(sandboxes, at_once, count)
        with BubblewrapSandboxes(folder / "warm", warm=2, makers=2) as sandboxes:
            say("resets with a warm pool ...")
            warm = _warm(sandboxes, min(count, 100))
    return {"at_once": at_once, "count": count, "makers": makers, **cold, **warm}


def _cold(sandboxes: BubblewrapSandboxes, at_once: int, count: int) -> dict[str, Any]:
    """The first `at_once` exist all together; after that each new one replaces one."""
    waits_ms: list[float] = []
    commands_ms: list[float] = []
    together = threading.Barrier(at_once)

    def use(number: int) -> None:
        began = time.perf_counter()
        made = sandboxes.create(SPEC, deadline_s=600.0)
        waits_ms.append((time.perf_counter() - began) * 1000)
        if number < at_once:
            together.wait(600.0)
        commands_ms.append(_timed_ms(lambda: made.exec(COMMAND)))
        made.close()

    began = time.perf_counter()
    with ThreadPoolExecutor(at_once) as threads:
        list(threads.map(use, range(count)))
    seconds = time.perf_counter() - began
    return {
        "created_per_s": round(count / seconds, 1),
        "create_p50_ms": _quantile(waits_ms, 50),
        "create_p95_ms": _quantile(waits_ms, 95),
        "busy_command_p50_ms": _quantile(commands_ms, 50),
        "busy_command_p95_ms": _quantile(commands_ms, 95),
    }


def _warm(sandboxes: BubblewrapSandboxes, count: int) -> dict[str, Any]:
    """Resets one after the other, each when a sandbox is ready."""
    made = sandboxes.create(SPEC)
    resets_ms, commands_ms = [], []
    for _ in range(count):
        while not sandboxes.ready(SPEC):
            time.sleep(0.005)
        resets_ms.append(_timed_ms(made.reset))
        commands_ms.append(_timed_ms(lambda: made.exec(COMMAND)))
    made.write_file("file", b"content")
    snapshot_ms = _timed_ms(made.snapshot)
    made.close()
    return {
        "warm_reset_p50_ms": _quantile(resets_ms, 50),
        "warm_reset_p95_ms": _quantile(resets_ms, 95),
        "command_p50_ms": _quantile(commands_ms, 50),
        "snapshot_ms": round(snapshot_ms, 2),
    }


def _timed_ms(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return (time.perf_counter() - began) * 1000


def _quantile(values: Sequence[float], percent: int) -> float:
    """
    >>> _quantile([1.0, 2.0, 3.0, 4.0], 50), _quantile([1.0], 95)
    (2.5, 1.0)
    """
    if len(values) == 1:
        return round(values[0], 2)
    return round(statistics.quantiles(values, n=100, method="inclusive")[percent - 1], 2)
