"""`rollart bench modes`: real runs of the five modes on the same work."""

import json as jsonlib
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from rollart.bench.common import read_tables, show_figures

WORK = "modes.toml"
WITHOUT = "latency_0"
"""Key of the figures without latency."""


def modes(
    out: Annotated[Path | None, typer.Option(help="Folder to keep the runs in; must be new or empty.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Runs of each row, of which the median counts.")] = None,
    rows: Annotated[str, typer.Option(help="Only these rows, separated by commas: plain,areal_latency_0.")] = "",
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout and nothing else.")] = False,
) -> None:
    """Trained trajectories per second in mode rollart, against the other four on the same work. Takes an hour and more.

    FrozenLake with environments that take 50 ms on average (log-normal, sigma 1), where 1 % of the steps hang for 5 s;
    then the same without latency (latency_0). Engine and trainer have a dedicated core each, in all modes. All modes
    have their defaults: in mode rollart, stragglers are replaced and groups may be trained without them.

    Further rows: areal_redundant is areal with the extra members of rollart; plain is rollart with all-or-nothing
    groups; only_… is plain with one of the mechanisms of rollart. bias compares what was offered with what was trained,
    per prompt and per member, over all runs of a row (see observe/bias.py).

    bound is what a perfect pipeline would reach relative to sync_plus: one whose slower stage never waits, never
    computes twice, and generates nothing that is not trained. of_bound is the share of it that rollart reaches.
    engine_busy and sync_share are for mode rollart: the share of time in which the engine took steps, and in which
    weight syncs suspended it.

    With --rows, figures that need a row that was left out are missing.

    Example: rollart bench modes --json
    """
    from rollart.bench.modes_run import measure  # here: the parts of a real run

    with tempfile.TemporaryDirectory(prefix="rollart-bench-") as beside:
        only = [row for row in rows.split(",") if row]
        result = measure(read_tables(WORK), Path(beside) if out is None else out, rounds=rounds, only=only)
    if json:
        sys.stdout.write(jsonlib.dumps(result) + "\n")
    else:
        _show("with latency", result)
        _show("without latency", result[WITHOUT])


def _show(title: str, result: dict[str, Any]) -> None:
    if not result["modes"]:
        return
    sys.stdout.write(f"{title}\n")
    show_figures(result["modes"])
    for name, value in result.items():
        if isinstance(value, float):
            sys.stdout.write(f"{name}: {value:.3f}\n")
    sys.stdout.write("\n")
