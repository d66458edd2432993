"""`rollart env`: look at an environment before a run depends on it."""

import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich import box
from rich.console import Console

from rollart.app.environment_check import EnvironmentCheck, check_environment, task_of
from rollart.app.tables import PlainTable
from rollart.config.load import check as checked
from rollart.config.load import load_toml, override
from rollart.config.schema import RunConfig

app = typer.Typer(no_args_is_help=True, help="Look at an environment before a run depends on it.")
SHOWN = 2000
"""Characters of an observation in the shown episode."""


@app.callback()
def environments() -> None:
    """Look at an environment before a run depends on it."""


@app.command()
def check(
    environment: Annotated[
        str,
        typer.Argument(
            metavar="TASK", help="A config file, a factory path (maze.py:Maze) or a name (gym:FrozenLake-v1)."
        ),
    ],
    task: Annotated[str, typer.Option(help="Task of the config file, if it has several.")] = "",
    python: Annotated[str, typer.Option(help="Interpreter that plays it; by default as the config says.")] = "",
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the task, such as max_turns=5."),
    ] = None,
    episodes: Annotated[int, typer.Option(min=1, help="Episodes per player.")] = 8,
    script: Annotated[str, typer.Option(help="A scripted player, a function of observations and a generator.")] = "",
    model: Annotated[str, typer.Option(help="A model folder, whose tokenizer counts tokens.")] = "",
    json: Annotated[bool, typer.Option("--json", help="Print only one JSON object on stdout.")] = False,
) -> None:
    """Play a task with a random and, where there is one, a scripted player; exit with 1 if something is wrong.

    Example: rollart env check gym:FrozenLake-v1 --set environment_settings.observe=ansi
    """
    config, with_tokens = _config(environment, task, [*(set_ or ()), *([f"python={python}"] if python else ())], model)
    name = task_of(config, task)
    result = check_environment(config, name, episodes=episodes, script=script, with_tokens=with_tokens)
    if json:
        sys.stdout.write(msgspec.json.encode(result).decode() + "\n")
    else:
        _show(Console(), result)
    if not result.passed:
        raise typer.Exit(1)


def _config(environment: str, task: str, changes: list[str], model: str) -> tuple[RunConfig, bool]:
    """The config, and whether it says how the model's tokens are made."""
    tables: dict[str, Any]
    if environment.endswith(".toml"):
        tables = load_toml(Path(environment))
        name = task or next(iter(tables.get("tasks", {})), "")
    else:
        name = task or "task"
        tables = {"tasks": {name: {"environment": environment}}, "pools": {"local": {}}}
    tables = override(tables, [f"tasks.{name}.{change}" for change in changes])
    if model:
        tables["model"] = model
    config = checked(RunConfig, tables)
    return config, isinstance(config.model, str) or bool(config.codec)


def _show(console: Console, result: EnvironmentCheck) -> None:
    for line in result.episode:
        head = f"[{line.speaker}]" + (f" reward {line.reward:g}" if line.reward else "")
        head += "" if line.tokens is None else f" {line.tokens} tokens"
        text = line.text if len(line.text) <= SHOWN else f"{line.text[:SHOWN]}… ({len(line.text):,} characters)"
        console.print(head, style="dim" if line.speaker == "environment" else "bold", markup=False, highlight=False)
        console.print(text, markup=False, highlight=False)
    table = PlainTable(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("player", "episodes", "mean reward", "lowest", "highest", "turns", "ended"):
        table.add_column(column, justify="left" if column == "player" else "right")
    for name, each in result.players.items():
        rewards = (each.mean_reward, each.lowest_reward, each.highest_reward)
        figures = [f"{reward:.3f}" for reward in rewards]
        table.add_row(name, str(each.episodes), *figures, f"{each.mean_turns:.1f}", f"{each.ended:.0%}")
    if result.players:
        console.print(table)
    for what, shown in _figures(result).items():
        console.print(f"{what:14} {shown}", markup=False, highlight=False)
    for note in result.notes:
        console.print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)
    for problem in result.problems:
        console.print(f"problem: {problem}", markup=False, highlight=False, soft_wrap=True, style="red")
    verdict = "passed" if result.passed else f"{len(result.problems)} problem(s)"
    console.print(f"{result.environment}: {verdict}", markup=False, highlight=False)


def _figures(result: EnvironmentCheck) -> dict[str, str]:
    shown = {}
    for name, times in (("reset", result.reset_ms), ("step", result.step_ms)):
        if times is not None:
            shown[name] = f"median {times.median:.2f} ms, 95 % {times.p95:.2f} ms, longest {times.longest:.2f} ms"
    sizes, left = result.sizes, result.leaks
    if sizes is not None:
        shown["observations"] = f"first {sizes.first_observation:,}, longest {sizes.longest_observation:,} characters"
        if sizes.longest_episode_tokens is not None:
            shown["episode"] = f"longest {sizes.longest_episode_tokens:,} tokens"
    if left is not None:
        counts = f"{left.threads:.1f} threads, {left.files:.1f} files"
        shown["left behind"] = f"{counts}, {left.memory_mb:.2f} MB per episode"
    return shown
