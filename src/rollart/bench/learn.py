"""`rollart bench learn`: learning in mode rollart against mode sync, by trained trajectories and by time."""

import enum
import json as jsonlib
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from rollart.app.output import check_target
from rollart.bench.common import read_tables
from rollart.types.errors import RequestError


class Work(enum.StrEnum):
    """What is learned."""

    HANGS = "hangs"
    LATENCY = "latency"

    @property
    def file(self) -> str:
        return WORK_FILES[self]


WORK_FILES = {Work.HANGS: "learn.toml", Work.LATENCY: "learn_latency.toml"}


def learn(
    work: Annotated[
        Work, typer.Option(help="Environments that sometimes hang, or a task whose reward depends on its latency.")
    ] = Work.HANGS,
    seeds: Annotated[int | None, typer.Option(min=1, help="Use only this many of the five seeds.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Write the curves as an SVG picture.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to keep the runs in (2.3 GB); must be new or empty.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout and nothing else.")] = False,
) -> None:
    """Held-out success of real runs, in mode rollart against mode sync. A seed takes 12 minutes, or 5 with latency.

    --work hangs: mode rollart with alpha 1 and 2. Arithmetic with a calculator, groups of 8, batches of 64, no
    redundancy; environments take 50 ms on average (log-normal, sigma 1), and 1 % of the steps hang for 5 s.

    --work latency: mode rollart as shipped (alpha 1), and with all-or-nothing groups (plain). Problems that end with a
    difference are slow: the calculator takes 0.5 s, longer than a training step, and a right answer needs it twice,
    while a hasty answer is wrong at once. Problems that end with a sum are quick and accept a hasty answer. Groups of
    8, batches of 128; kinds are evaluated apart (kinds), and success is their mean. It does not detect dropped prompts:
    training on the quick kind alone teaches the slow kind too.

    All arms of a seed start from the same model. Checkpoints are evaluated after their run, on the same held-out
    prompts and without latency: the time of a run includes no evaluation.

    points_…: rollart minus sync after the last step of sync, at equal trained trajectories, paired by seed; low and
    high are the 95 % interval of the mean by Student's t (two-sided), and worst is the lowest seed, an exact lower
    bound of the median (97 % with five seeds). curve_points_…: the same, averaged over all evaluated steps.
    time_ratio_…: time until rollart's mean curve reaches sync's final success, relative to the time of sync; null:
    never. stale_share: groups that became too stale to train on, as a share of these and the trained ones. prompt_bias:
    distance (Kolmogorov-Smirnov) of trained from offered prompts. finals, points_by_seed: the same success and points
    of each seed.

    Example: rollart bench learn --picture learn.svg
    Example: rollart bench learn --work latency --json
    """
    check_target("--picture", picture)
    tables = read_tables(work.file)
    known = tables["seeds"]
    if seeds is not None and seeds > len(known):
        raise RequestError(f"--seeds {seeds}: there are only {len(known)}")
    from rollart.bench.learn_picture import learn_svg
    from rollart.bench.learn_run import Bench  # here, because other commands do not need its imports

    with tempfile.TemporaryDirectory(prefix="rollart-bench-") as beside:
        result = Bench(tables, Path(beside) if out is None else out).measure(known[:seeds])
    if picture is not None:
        picture.write_text(learn_svg(result["arms"]), encoding="utf-8")
    if json:
        sys.stdout.write(jsonlib.dumps(result) + "\n")
    else:
        show(Console(), result)


def show(console: Console, result: Mapping[str, Any]) -> None:
    """Print a row per arm."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("arm", "success", "points against sync", "time", "until sync's success", "stale groups"):
        table.add_column(column, justify="left" if column == "arm" else "right")
    for arm, success in result["success"].items():
        compared = f"points_{arm}" in result
        table.add_row(
            arm,
            f"{success['before']:.0%} → {success['after']:.0%}",
            _points(result[f"points_{arm}"]) if compared else "",
            f"{result['seconds'][arm]:.0f} s",
            _ratio(result[f"time_ratio_{arm}"]) if compared else "",
            f"{result['stale_share'][arm]:.0%}",
        )
    console.print(table)
    for kind, of_kind in result["kinds"].items():
        arms = (
            f"{arm} {after:.1%}" + (f", {_points(of_kind[f'points_{arm}'])}" if f"points_{arm}" in of_kind else "")
            for arm, after in of_kind["after"].items()
        )
        console.print(f"{kind} ({of_kind['before']:.0%} before): {'; '.join(arms)}")


def _points(points: Mapping[str, float | None]) -> str:
    if points["low"] is None:
        return f"{points['mean']:+.1f}"
    return f"{points['mean']:+.1f} ({points['low']:+.1f} to {points['high']:+.1f})"


def _ratio(ratio: float | None) -> str:
    return "not reached" if ratio is None else f"{ratio:.2f} of its time"
