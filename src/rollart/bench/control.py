"""`rollart bench control`: the cost of the controller itself, in CPU seconds of this machine."""

import json as jsonlib
import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from rollart.app.huge_pages import large_pages
from rollart.sim.run import simulate
from rollart.sim.scenario import Scenario, load_scenario
from rollart.types.errors import RequestError, RunError
from rollart.types.journal import JournalEvent, StepTrained, TurnEnded

SIZES = (100, 1_000, 10_240, 30_000)
"""Concurrent trajectories. The figures are those of the third size; the exponent is fitted over all."""
HEADLINE = 10_240
REPEATS = {100: 5, 1_000: 3}
"""Repeats of short sizes, of which the median counts: a disturbed one would tilt the fit."""
SMALLEST = 32
"""One engine of each class."""


def control(
    sizes: Annotated[str, typer.Option(hidden=True, help="Concurrent trajectories, for tests: 32,64.")] = "",
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout and nothing else.")] = False,
) -> None:
    """CPU and memory of the controller, from 100 to 30,000 concurrent trajectories. Takes several minutes.

    Every size runs the scenario `huge` in its own process, in virtual time and mode rollart, with engines and
    environments in proportion, and with large pages, as `rollart sim` does for large scenarios. The simulated workers
    are part of the cost. Small sizes run several times, and the median counts.

    Example: rollart bench control --json
    """
    wanted = _parse_sizes(sizes) if sizes else SIZES
    result = summarise([_median([_measure_apart(size) for _ in range(REPEATS.get(size, 1))]) for size in wanted])
    if json:
        sys.stdout.write(jsonlib.dumps(result) + "\n")
    else:
        _show(Console(), result)


def scaled(trajectories: int) -> Scenario:
    """The scenario `huge` at another size, with environments, batch and engines in proportion."""
    environments = trajectories // 2
    engines = max(1, trajectories // 32)
    return load_scenario(
        "huge",
        [
            # Whole groups of 8 for two tasks.
            f"batch.trajectories={trajectories // 16 * 16}",
            f"tasks.code.environments={environments}",
            f"tasks.browse.environments={environments}",
            f"pools.H800.engines={engines}",
            f"pools.H20.engines={engines}",
            f"sim.trainer.ranks={max(1, trajectories // 20)}",
        ],
    )


class CountingSink:
    """Counts events and keeps none: a real journal goes to disk, not into the memory that is measured."""

    def __init__(self) -> None:
        self.events = 0
        self.turns = 0
        self.steps = 0

    def append(self, event: JournalEvent) -> None:
        self.events += 1
        kind = type(event)
        if kind is TurnEnded:
            self.turns += 1
        elif kind is StepTrained:
            self.steps += 1

    async def flush(self) -> None:
        pass

    async def close(self) -> None:
        pass


def measure(trajectories: int) -> dict[str, Any]:
    """Run one size in this process. Peak memory is that of the process, which should do nothing else."""
    scenario = scaled(trajectories)
    sink = CountingSink()
    before_s = time.process_time()
    done = simulate(scenario, sink)
    cpu_s = time.process_time() - before_s
    if done.error is not None:
        raise done.error
    return {
        "trajectories": trajectories,
        "engines": sum(pool.engines for pool in scenario.config.pools.values()),
        "steps": sink.steps,
        "turns": sink.turns,
        "events": sink.events,
        "cpu_s": cpu_s,
        "step_cpu_s": cpu_s / sink.steps,
        "us_per_turn": cpu_s / sink.turns * 1e6,
        "peak_mb": peak_mb(),
    }


def peak_mb() -> float:
    """Peak resident memory of this process.

    Not from `getrusage`: on Linux a child starts with its parent's value.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / 1e6
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6


def summarise(sizes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures at 10,240 trajectories (or the largest size), and how the CPU time of a step grows with the size."""
    headline = next((size for size in sizes if size["trajectories"] == HEADLINE), sizes[-1])
    return {
        "us_per_turn": headline["us_per_turn"],
        "step_cpu_s": headline["step_cpu_s"],
        "peak_mb": headline["peak_mb"],
        "growth_exponent": growth_exponent([(size["trajectories"], size["step_cpu_s"]) for size in sizes]),
        "sizes": list(sizes),
    }


def _median(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The run with the median CPU time."""
    return sorted(runs, key=lambda run: run["cpu_s"])[len(runs) // 2]


def growth_exponent(points: Sequence[tuple[float, float]]) -> float | None:
    """Slope of a least-squares line through the logarithms; None for fewer than two sizes.

    >>> round(growth_exponent([(100, 2.0), (1000, 20.0), (10000, 200.0)]), 6)
    1.0
    """
    xs = [math.log(x) for x, _ in points]
    ys = [math.log(y) for _, y in points]
    mean_x, mean_y = math.fsum(xs) / len(xs), math.fsum(ys) / len(ys)
    spread = math.fsum((x - mean_x) ** 2 for x in xs)
    if not spread:
        return None
    return math.fsum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread


def _measure_apart(trajectories: int) -> dict[str, Any]:
    """`measure` in its own process, so that peak memory is that of this size."""
    sys.stderr.write(f"{trajectories:,} trajectories ... ")
    sys.stderr.flush()
    done = subprocess.run(
        [sys.executable, "-m", "rollart.bench.control", str(trajectories)],
        capture_output=True,
        text=True,
        check=False,
        env=large_pages(os.environ),
    )
    if done.returncode:
        sys.stderr.write("failed\n")
        raise RunError(f"the bench of {trajectories} trajectories failed: {done.stderr.strip()[-500:]}")
    size: dict[str, Any] = jsonlib.loads(done.stdout)
    sys.stderr.write(f"{size['cpu_s']:.1f} s of CPU, {size['us_per_turn']:.0f} µs per turn\n")
    return size


def _parse_sizes(text: str) -> list[int]:
    try:
        sizes = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise RequestError(f"--sizes: {text!r} is not a list of numbers such as 100,1000") from None
    if sizes[0] < SMALLEST:
        raise RequestError(f"--sizes: at least {SMALLEST} concurrent trajectories are needed, not {sizes[0]}")
    return sizes


def _show(console: Console, result: dict[str, Any]) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("trajectories", "engines", "turns", "µs per turn", "CPU per step", "peak memory"):
        table.add_column(column, justify="right")
    for size in result["sizes"]:
        table.add_row(
            f"{size['trajectories']:,}",
            f"{size['engines']:,}",
            f"{size['turns']:,}",
            f"{size['us_per_turn']:.1f}",
            f"{size['step_cpu_s']:.2f} s",
            f"{size['peak_mb']:.0f} MB",
        )
    console.print(table)
    exponent = result["growth_exponent"]
    if exponent is not None:
        console.print(f"CPU time of a step grows with the number of trajectories to the power of {exponent:.3f}")


if __name__ == "__main__":
    sys.stdout.write(jsonlib.dumps(measure(int(sys.argv[1]))) + "\n")
