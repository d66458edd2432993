"""`rollart bench`: what the controller itself costs, in CPU seconds of this machine."""

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

from rollart.cli.bench_all import all_
from rollart.cli.bench_engine import engine
from rollart.cli.bench_learn import learn
from rollart.cli.bench_loop import loop
from rollart.cli.bench_modes import modes
from rollart.cli.bench_train import train
from rollart.cli.bench_trl import trl
from rollart.cli.pages import large_pages
from rollart.sim.run import simulate
from rollart.sim.scenario import Scenario, load_scenario
from rollart.types.errors import RequestError, RunError
from rollart.types.journal import JournalEvent, StepTrained, TurnEnded

SIZES = (100, 1_000, 10_240, 30_000)
"""Trajectories at once. The figures are those of the third; the exponent is over all."""
HEADLINE = 10_240
REPEATS = {100: 5, 1_000: 3}
"""Of sizes that are over in a moment, the median counts: one that was disturbed would tilt the line of growth."""
SMALLEST = 32
"""One engine of each class."""

app = typer.Typer(help="Measure rollart itself.", no_args_is_help=True, add_completion=False)
app.command()(engine)
app.command()(train)
app.command()(loop)
app.command()(modes)
app.command()(trl)
app.command()(learn)
app.command("all")(all_)


@app.callback()
def bench() -> None:
    """Measure rollart itself."""


@app.command()
def control(
    sizes: Annotated[str, typer.Option(hidden=True, help="Trajectories at once, for tests: 32,64.")] = "",
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout and nothing else.")] = False,
) -> None:
    """CPU and memory of the controller, from 100 to 30,000 trajectories at once. Takes some minutes.

    Every size is a process of its own that runs the scenario `huge` in virtual time, in mode rollart, with engines and
    environments in proportion, and with large pages, as `rollart sim` runs what is large. The simulated workers are
    part of the cost. Small sizes run several times, and the median counts.

    Example: rollart bench control --json
    """
    wanted = _parse_sizes(sizes) if sizes else SIZES
    result = summarise([_median([_measure_apart(size) for _ in range(REPEATS.get(size, 1))]) for size in wanted])
    if json:
        sys.stdout.write(jsonlib.dumps(result) + "\n")
    else:
        _show(Console(), result)


def scaled(trajectories: int) -> Scenario:
    """The scenario `huge` at another size: environments for so many at once, batch and engines in proportion."""
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
    """Counts events and keeps none: a real journal goes to a disk, not into the memory that is measured."""

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
    """Run one size in this process. Peak memory is the process's, so it should have done nothing else."""
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
    """The most memory that this process ever had resident.

    `getrusage` would do, but on Linux a child starts with what its parent had.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / 1e6
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6


def summarise(sizes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures at 10,240 trajectories (or the largest size there is), and how the CPU of a step grows with them."""
    headline = next((size for size in sizes if size["trajectories"] == HEADLINE), sizes[-1])
    return {
        "us_per_turn": headline["us_per_turn"],
        "step_cpu_s": headline["step_cpu_s"],
        "peak_mb": headline["peak_mb"],
        "growth_exponent": growth_exponent([(size["trajectories"], size["step_cpu_s"]) for size in sizes]),
        "sizes": list(sizes),
    }


def _median(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The run of median CPU time."""
    return sorted(runs, key=lambda run: run["cpu_s"])[len(runs) // 2]


def growth_exponent(points: Sequence[tuple[float, float]]) -> float | None:
    """The slope of a least-squares line through the logarithms; None for fewer than two sizes.

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
    """`measure` in a process of its own, so that peak memory is this size's."""
    sys.stderr.write(f"{trajectories:,} trajectories ... ")
    sys.stderr.flush()
    done = subprocess.run(
        [sys.executable, "-m", "rollart.cli.bench", str(trajectories)],
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
        raise RequestError(f"--sizes: a bench needs at least {SMALLEST} trajectories at once, not {sizes[0]}")
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
        console.print(f"CPU of a step grows with the {exponent:.3f}th power of the number of trajectories")


if __name__ == "__main__":
    sys.stdout.write(jsonlib.dumps(measure(int(sys.argv[1]))) + "\n")
