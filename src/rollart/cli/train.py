"""`rollart train`: a real run."""

import sys
from importlib import resources
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from rollart.app.checkpoints import newest_name
from rollart.app.cluster import check_placement, cluster_nodes, connected, placement
from rollart.app.compose import first_workers
from rollart.app.devices import plan_devices
from rollart.app.report_page import known_baselines
from rollart.app.run_folder import CONFIG, JOURNAL
from rollart.app.running import RuntimeKind, carry_out, new_run, require, resumed_run
from rollart.cli.render import show_devices, show_placement, show_plan, show_report
from rollart.config.load import load_toml, override
from rollart.config.suggest import did_you_mean
from rollart.observe.journal import digest, read_journal
from rollart.policy.placement import inventory
from rollart.types.errors import RequestError

QUICKSTART = "quickstart"
PRESETS = resources.files("rollart.config") / "presets"


def train(
    config: Annotated[
        str | None, typer.Argument(help="A TOML file, or a preset: quickstart, frozenlake, shop, …")
    ] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Change a key: --set steps=20. Repeatable.")] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; must be new or empty.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Run folder to resume from its last checkpoint.")] = None,
    continue_: Annotated[
        bool, typer.Option("--continue", help="Resume the run in --out if there is one; for what restarts by itself.")
    ] = False,
    runtime: Annotated[
        RuntimeKind, typer.Option(help="Workers as processes (ray), or as threads of this one (inline).")
    ] = RuntimeKind.RAY,
    address: Annotated[
        str | None, typer.Option(help="Run on a Ray cluster: HOST:PORT of its head, or auto (see `rollart cluster`).")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the resolved config and worker placement.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print only one JSON object on stdout.")] = False,
) -> None:
    """Train, on this machine or a cluster. Without CONFIG: the quickstart, three tasks from scratch in minutes.

    Example: rollart train frozenlake --set steps=20 --out runs/first
    """
    require(runtime)
    if dry_run and json:
        raise RequestError("--dry-run prints tables; omit --json")
    assignments = list(set_ or [])
    if continue_:
        if out is None:
            raise RequestError("--continue needs --out, the folder of the run")
        if (out / CONFIG).is_file():
            config, out, resume = None, None, out
    if resume is not None:
        if config is not None or out is not None:
            raise RequestError("--resume uses the config and the folder of the run; omit CONFIG and --out")
        plan = resumed_run(resume, lambda tables: override(tables, assignments))
    else:
        plan = new_run(override(load_toml(config_file(config or QUICKSTART)), assignments))
    if dry_run:
        with connected(address) as cluster:
            devices = plan_devices(plan.config, None if cluster is None else cluster_nodes(), plan.folder)
            show_plan(Console(), devices.config, first_workers(devices.config))
            show_devices(Console(), devices)
            if cluster is not None:
                show_placement(Console(), placement(devices.config), inventory(cluster_nodes()))
                check_placement(plan.config, resumed=resume is not None)
        return
    folder, report = carry_out(plan, runtime, out, address=address)
    checkpoint = newest_name(plan.config, folder)
    if json:
        figures = msgspec.to_builtins(report, str_keys=True)
        extra = {
            "wasted_token_share": report.wasted_token_share,
            "digest": digest(read_journal(folder / JOURNAL)),
            "folder": str(folder),
            "checkpoint": checkpoint or None,
        }
        sys.stdout.write(msgspec.json.encode(figures | extra).decode() + "\n")
        return
    show_report(Console(), report, known_baselines(plan.config))


def config_file(config: str) -> Path:
    """Resolve the name of a preset, or the path of a file."""
    known = presets()
    if config in known:
        with resources.as_file(PRESETS) as folder:
            return folder / f"{config}.toml"
    if "." not in config and not Path(config).exists():
        raise RequestError(
            f"{config!r} is neither a preset{did_you_mean(config, known)} nor a file; presets are {', '.join(known)}"
        )
    return Path(config)


def presets() -> list[str]:
    with resources.as_file(PRESETS) as folder:
        return sorted(path.stem for path in folder.glob("*.toml"))
