"""`rollart bench loop`: properties of the whole loop, measured in real runs."""

import json as jsonlib
import sys
import tempfile
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from rollart.bench.common import read_tables

WORK = "loop.toml"


class Part(StrEnum):
    """One measurement."""

    BAD = "bad"
    BUSY = "busy"
    RUNTIMES = "runtimes"


def loop(
    part: Annotated[Part | None, typer.Option(help="One part; all by default.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to keep the runs in; must be new or empty.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout and nothing else.")] = False,
) -> None:
    """Three measurements of the whole loop, from the journals of real runs on this machine. All take about ten minutes.

    bad: two of 32 environments fail: one hangs forever and one raises in the third turn of its episodes. bad_over_clean
    is the throughput of that run, in trained trajectories per second after the first step, relative to the same run
    without them; bad_over_share is that relative to 30/32. trained_failures must be 0.

    busy: rollout is the bottleneck. Excluding start and end of the run, engine_busy is the share of time that the
    engines of a pool spent in steps, by their own clocks; recompute_share of that went into KV invalidated by updates.
    sync_share is the share of time in which weight syncs suspended them.

    runtimes: the same run inline and with Ray, in mode sync. same_assignment: every batch had the same prompts and
    seeds. held_out is the success on held-out prompts, by runtime and seed.

    Example: rollart bench loop --part bad --json
    """
    from rollart.bench.loop_run import Bench  # here, because other commands do not need its imports

    tables = read_tables(WORK)
    with tempfile.TemporaryDirectory(prefix="rollart-bench-") as beside:
        bench = Bench(tables, Path(beside) if out is None else out)
        result = {each.value: bench.measure(each) for each in ([part] if part else Part)}
    if json:
        sys.stdout.write(jsonlib.dumps(result) + "\n")
    else:
        _show(result)


def _show(result: Mapping[str, Mapping[str, Any]]) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("proof", "figure", "value"):
        table.add_column(column)
    for part, figures in result.items():
        for number, (name, value) in enumerate(figures.items()):
            table.add_row("" if number else part, name, _text(value), end_section=number == len(figures) - 1)
    Console().print(table)


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_text(inner)}" for name, inner in value.items()) or "none"
    return f"{value:,.3f}" if isinstance(value, float) else str(value)
