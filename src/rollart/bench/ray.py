"""`rollart bench ray`: a run on two Ray nodes against one on a private Ray, and weights between nodes."""

import json as jsonlib
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from rollart.bench.common import read_tables

WORK = "ray.toml"


def ray(
    out: Annotated[Path | None, typer.Option(help="Folder to keep the runs in; must be new or empty.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Pairs of runs, of which the medians count.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout and nothing else.")] = False,
) -> None:
    """A run on two Ray nodes of this machine, against the same on a private Ray; weights against TCP. Takes 15 minutes.

    FrozenLake with 256 concurrent trajectories. us_per_turn is the CPU time of the controller per turn on the cluster,
    over_local the throughput there relative to the private Ray: medians of interleaved pairs. sync_share is the share
    of time in which weight syncs suspended the engines of the quickstart on the cluster. weight_over_tcp is the rate at
    which a version of 500 MB reaches both nodes, relative to one TCP stream of as much between them.

    Example: rollart bench ray --json
    """
    from rollart.bench.ray_run import measure  # here: the parts of a real run

    with tempfile.TemporaryDirectory(prefix="rollart-bench-") as beside:
        result = measure(read_tables(WORK), Path(beside) if out is None else out, rounds)
    if json:
        sys.stdout.write(jsonlib.dumps(result) + "\n")
    else:
        for name, value in result.items():
            sys.stdout.write(f"{name}: {value:.3g}\n" if isinstance(value, float) else f"{name}: {value}\n")
