"""`rollart train`: a real run."""

import sys
from importlib import resources
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from rollart.cli.compose import baselines_of, worker_specs
from rollart.cli.render import show_plan, show_report
from rollart.cli.running import JOURNAL, RuntimeKind, carry_out, new_run, require, resumed_run
from rollart.config.load import load_toml, override
from rollart.observe.journal import digest, read_journal
from rollart.types.errors import RequestError

PRESET = "frozenlake"


def train(
    config: Annotated[Path | None, typer.Argument(help="A TOML file; without one, a small FrozenLake.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Change a key: --set steps=20. Repeatable.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run; must be new or empty.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Folder of a run to go on with from its checkpoint.")] = None,
    runtime: Annotated[
        RuntimeKind, typer.Option(help="Workers as threads of this process (inline) or as processes (ray).")
    ] = RuntimeKind.INLINE,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the resolved config and what goes where.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout and nothing else.")] = False,
) -> None:
    """Train for real, on this machine.

    Example: rollart train --set steps=20 --out runs/first
    """
    require(runtime)
    assignments = list(set_ or [])
    if resume is not None:
        if config is not None or out is not None:
            raise RequestError("--resume takes the config and the folder of the run; leave CONFIG and --out away")
        plan = resumed_run(resume, lambda tables: override(tables, assignments))
    else:
        plan = new_run(override(load_toml(config or preset()), assignments))
    if dry_run:
        show_plan(Console(), plan.config, worker_specs(plan.config, None, None))
        return
    folder, report = carry_out(plan, runtime, out)
    if json:
        figures = msgspec.to_builtins(report, str_keys=True)
        extra = {
            "wasted_token_share": report.wasted_token_share,
            "digest": digest(read_journal(folder / JOURNAL)),
            "folder": str(folder),
        }
        sys.stdout.write(msgspec.json.encode(figures | extra).decode() + "\n")
        return
    show_report(Console(), report, baselines_of(plan.config))


def preset() -> Path:
    with resources.as_file(resources.files("rollart.config") / "presets" / f"{PRESET}.toml") as path:
        return path
