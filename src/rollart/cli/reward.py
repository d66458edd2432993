"""`rollart reward`: try a reward function on what a run has stored, or serve it."""

import importlib.util
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.markup import escape

from rollart.app.functions.package import Target
from rollart.app.functions.package import package as write_package
from rollart.app.reward_trial import Trial, try_reward
from rollart.app.tables import PlainTable
from rollart.types.errors import RequestError

app = typer.Typer(no_args_is_help=True, help="Try, serve and package reward functions.")
SHOWN = 10
"""Number of changed transcripts in the table."""


@app.callback()
def rewards() -> None:
    """Try, serve and package reward functions."""


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


@app.command()
def serve(
    function: Annotated[str, typer.Argument(help="A reward function, such as my_rewards.py:correct.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 = any that is free.")] = 8080,
    concurrency: Annotated[int, typer.Option(min=1, help="Calls at a time; more get status 429.")] = 8,
    secret_env: Annotated[
        str, typer.Option(help="Environment variable with the secret of clients; without a value, one is generated.")
    ] = "ROLLART_REWARD_SECRET",
    grace_s: Annotated[int, typer.Option(min=0, help="Seconds for calls to finish after SIGTERM.")] = 20,
) -> None:
    """Serve a reward function over HTTP, until Ctrl-C or SIGTERM. Rewards of a task use it with `run = "http://…"`.

    Example: rollart reward serve my_rewards.py:correct --port 8080
    """
    _need("uvicorn", extra="serve")
    from rollart.app.functions.server import serve_function  # late: other commands need no server

    serve_function(function, host, port, secret_env=secret_env, concurrency=concurrency, grace_s=grace_s)


@app.command()
def platform(
    function: Annotated[str, typer.Argument(help="A reward function, such as my_rewards.py:correct.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 = any that is free.")] = 8080,
    max_replicas: Annotated[int, typer.Option(min=1, help="Replicas at most; each runs one call at a time.")] = 8,
    idle_s: Annotated[float, typer.Option(min=0, help="Seconds without calls after which a replica ends.")] = 5.0,
    cpus: Annotated[float, typer.Option(min=0, help="CPUs that a replica reserves.")] = 0.25,
    address: Annotated[
        str | None, typer.Option(help="Use this Ray cluster (HOST:PORT, or auto); by default a Ray of its own.")
    ] = None,
    secret_env: Annotated[
        str, typer.Option(help="Environment variable with the secret of clients; without a value, one is generated.")
    ] = "ROLLART_REWARD_SECRET",
    grace_s: Annotated[int, typer.Option(min=0, help="Seconds for calls to finish after SIGTERM.")] = 20,
) -> None:
    """Serve a reward function on Ray Serve, with as many replicas as calls need, and none while there are no calls.

    Example: rollart reward platform my_rewards.py:correct --max-replicas 8
    """
    _need("uvicorn", "ray", "fastapi", extra="functions")
    from rollart.app.functions.platform import serve_platform  # late: other commands need no Ray
    from rollart.distributed.serve_platform import PlatformSettings

    settings = PlatformSettings(max_replicas, idle_s, cpus)
    serve_platform(function, host, port, settings, secret_env=secret_env, grace_s=grace_s, address=address)


@app.command()
def package(
    function: Annotated[str, typer.Argument(help="A reward function, such as my_rewards.py:correct.")],
    target: Annotated[Target, typer.Option(help="Where it will run.")],
    out: Annotated[Path, typer.Option(help="A new folder.")],
    include: Annotated[list[Path] | None, typer.Option(help="More files or folders that the function reads.")] = None,
) -> None:
    """Write a folder that can be deployed: the function, what it needs, and a README with the commands.

    Example: rollart reward package my_rewards.py:correct --target lambda --out deploy
    """
    packaged = write_package(function, target, out, include or ())
    console = Console(markup=False)
    console.print(f"{len(packaged.files)} files, {packaged.bytes / 1e3:,.0f} kB in {out}; next: {out / 'README.md'}")
    console.print(f"requirements: {', '.join(packaged.requirements)}")


def _need(*packages: str, extra: str) -> None:
    missing = [each for each in packages if importlib.util.find_spec(each) is None]
    if missing:
        raise RequestError(f"this needs {', '.join(missing)}; install them with: pip install 'rollart[{extra}]'")


def _show(console: Console, trial: Trial) -> None:
    table = PlainTable("task", "transcripts", "failed", "changed", f"mean {escape(trial.compared_with)}", "would be")
    for row in trial.tasks:
        counts = (row.scored + row.failed, row.failed, row.changed)
        table.add_row(row.task, *map(str, counts), _number(row.before), _number(row.after))
    console.print(table)
    changed = [each for each in trial.transcripts if each.changed]
    if not changed:
        return
    compared_with = escape(trial.compared_with)
    table = PlainTable("trajectory", "task", "step", compared_with, "would be", title="largest changes")
    for each in changed[:SHOWN]:
        step = "" if each.step is None else str(each.step)
        after = each.error if each.after is None else _number(each.after)
        table.add_row(str(each.trajectory), each.task, step, _number(each.before), after)
    console.print(table)
    if len(changed) > SHOWN:
        console.print(f"… and {len(changed) - SHOWN:,} more; --json lists all")


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"
