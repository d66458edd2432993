"""`rollart bench affinity`: classes found by measurement, against fixed ones."""

import json as jsonlib
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from rollart.bench.common import read_tables

WORK = "affinity.toml"


def affinity(
    out: Annotated[Path | None, typer.Option(help="Folder to keep the runs in; must be new or empty.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Runs of each row, of which the median counts.")] = None,
    sim: Annotated[bool, typer.Option("--sim", help="In virtual time, with the paper's tasks and pools.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout and nothing else.")] = False,
) -> None:
    """Trained trajectories per second with `hardware = "auto"`, against fixed assignments. Takes an hour or more.

    Three tasks (long prompts, long answers, and between) on two pools of the torch engine, one slowed at sampling and
    one at prompts. over_best_fixed: against the better of the two sensible assignments; over_wrong: against the better
    of two that send prompts and answers to the wrong pool. All are medians of interleaved runs.

    assigned_by_step is the step by which all tasks had the classes of a sensible assignment, moves_after_20_steps what
    moved later in the long runs, each the worst of all runs. change: a run in which the pools change places in the
    middle; noticed says whether the tasks moved with them, after_steps how soon.

    With --sim, in minutes: the paper's scenario at about equal cost on both classes of hardware, with declared classes
    and with auto, on H800 alone and on H20 alone; means over the seeds.

    Example: rollart bench affinity --sim
    """
    from rollart.bench.affinity_run import measure, measure_paper  # here: the parts of a real run

    tables = read_tables(WORK)
    if sim:
        result = measure_paper(tables["paper"])
    else:
        with tempfile.TemporaryDirectory(prefix="rollart-bench-") as beside:
            result = measure(tables, Path(beside) if out is None else out, rounds=rounds)
    if json:
        sys.stdout.write(jsonlib.dumps(result) + "\n")
    else:
        _show(result)


def _show(result: dict[str, Any], indent: str = "") -> None:
    for name, value in result.items():
        if isinstance(value, dict):
            sys.stdout.write(f"{indent}{name}\n")
            _show(value, indent + "  ")
        else:
            sys.stdout.write(f"{indent}{name}: {f'{value:.3f}' if isinstance(value, float) else value}\n")
