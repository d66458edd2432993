"""`rollart reward`: try a reward function on what a run has stored."""

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from rollart.app.reward_trial import Trial, try_reward

app = typer.Typer(no_args_is_help=True, help="Try reward functions on the transcripts of a run.")
SHOWN = 10
"""Number of changed transcripts in the table."""


@app.callback()
def rewards() -> None:
    """Try reward functions on the transcripts of a run."""


@app.command("try")
def try_(
    function: Annotated[str, typer.Argument(help="A reward function, such as my_rewards.py:correct.")],
    run: Annotated[Path, typer.Argument(help="A run folder: finished, unfinished or killed.")],
    task: Annotated[str, typer.Option(help="Only transcripts of this task; by default of all.")] = "",
    reward: Annotated[str, typer.Option(help="Compare with this reward of several; by default with their sum.")] = "",
    json: Annotated[bool, typer.Option("--json", help="Print only one JSON object on stdout.")] = False,
) -> None:
    """Score the stored transcripts of a run again, and show what would have changed. Changes nothing.

    Example: rollart reward try my_rewards.py:correct runs/quickstart-1
    """
    trial = try_reward(function, run, task, reward)
    if json:
        sys.stdout.write(msgspec.json.encode(trial).decode() + "\n")
    else:
        _show(Console(), trial)


def _show(console: Console, trial: Trial) -> None:
    table = Table("task", "transcripts", "failed", "changed", f"mean {trial.compared_with}", "would be")
    for row in trial.tasks:
        counts = (row.scored + row.failed, row.failed, row.changed)
        table.add_row(row.task, *map(str, counts), _number(row.before), _number(row.after))
    console.print(table)
    changed = [each for each in trial.transcripts if each.changed]
    if not changed:
        return
    table = Table("trajectory", "task", "step", trial.compared_with, "would be", title="largest changes")
    for each in changed[:SHOWN]:
        step = "" if each.step is None else str(each.step)
        after = each.error if each.after is None else _number(each.after)
        table.add_row(str(each.trajectory), each.task, step, _number(each.before), after)
    console.print(table)
    if len(changed) > SHOWN:
        console.print(f"… and {len(changed) - SHOWN:,} more; --json lists all")


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"
