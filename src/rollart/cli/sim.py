"""`rollart sim`: the whole pipeline in virtual time."""

import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from rollart.app.huge_pages import MANY_AGENTS, restart_with_large_pages
from rollart.app.output import check_target
from rollart.cli.picture import comparison_svg
from rollart.cli.render import show_comparison, show_report
from rollart.config.modes import Mode
from rollart.config.suggest import did_you_mean
from rollart.observe.journal import digest
from rollart.observe.report import Report, make_report
from rollart.sim.run import simulate
from rollart.sim.scenario import load_scenario
from rollart.types.errors import RequestError

ALL = "all"


def sim(
    scenario: Annotated[str, typer.Argument(help="Scenario, such as laptop.")] = "laptop",
    mode: Annotated[str, typer.Option(help="sync, sync_plus, one_off, areal, rollart, or all side by side.")] = "",
    seed: Annotated[int | None, typer.Option(help="Seed of the scenario's random draws.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Change a key: --set alpha=2. Repeatable.")] = None,
    svg: Annotated[Path | None, typer.Option(help="With --mode all: write the comparison as an SVG.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print only one JSON object on stdout.")] = False,
) -> None:
    """Run a scenario in virtual time and show where the time went.

    Example: rollart sim laptop --mode all
    """
    assignments = list(set_ or [])
    if seed is not None:
        assignments.append(f"seed={seed}")
    modes = _modes(mode)
    check_target("--svg", svg)
    reports: dict[str, tuple[Report, str]] = {}
    for name in modes:
        loaded = load_scenario(scenario, [*assignments, *([f"mode={name}"] if name else [])])
        if loaded.config.batch.trajectories >= MANY_AGENTS:
            restart_with_large_pages()
        done = simulate(loaded)
        if done.error is not None:
            raise done.error
        report = make_report(done.events)
        reports[report.mode] = (report, digest(done.events))
    if svg is not None:
        svg.write_text(comparison_svg([report for report, _ in reports.values()]), encoding="utf-8")
    if json:
        sys.stdout.write(msgspec.json.encode(_as_json(reports)).decode() + "\n")
        return
    console = Console()
    for report, _ in reports.values() if len(reports) == 1 else ():
        show_report(console, report)
    if len(reports) > 1:
        show_comparison(console, [report for report, _ in reports.values()])


def _modes(mode: str) -> list[str]:
    if mode == ALL:
        return [name.value for name in Mode]
    return [parse_mode(mode, ALL).value] if mode else [""]


def parse_mode(mode: str, *also: str) -> Mode:
    """Parse the name of a mode; `also` lists other values that the caller accepts, for the error message."""
    if mode not in list(Mode):
        known = [*Mode, *also]
        raise RequestError(f"--mode: no mode {mode!r}{did_you_mean(mode, known)}; modes are {', '.join(known)}")
    return Mode(mode)


def _as_json(reports: dict[str, tuple[Report, str]]) -> dict[str, Any]:
    single = {
        mode: msgspec.to_builtins(report, str_keys=True)
        | {"wasted_token_share": report.wasted_token_share, "digest": journal}
        for mode, (report, journal) in reports.items()
    }
    return next(iter(single.values())) if len(single) == 1 else {"modes": single}
