"""`rollart audit`: whether a run kept the rules, from its journal alone."""

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from rollart.cli.render import show_waste
from rollart.cli.train import JOURNAL
from rollart.observe.audit import Auditor
from rollart.observe.journal import read_journal
from rollart.observe.report import make_report


def audit(
    run: Annotated[Path, typer.Argument(help="A run folder, its journal, or a trace of `rollart fuzz`.")],
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout and nothing else.")] = False,
) -> None:
    """Check conservation, staleness, shares, versions and lineage of a run, and say what was wasted and why.

    Example: rollart audit runs/frozenlake-1
    """
    path = run / JOURNAL if run.is_dir() else run
    auditor = Auditor()
    events = []
    for event in read_journal(path):
        auditor.take(event)
        events.append(event)
    violations = auditor.finish()
    report = make_report(events)
    if json:
        body = {
            "events": len(events),
            "ended": report.ended,
            "violations": [{"rule": v.rule, "event": v.event, "what": v.what} for v in violations],
            "outcomes": report.outcomes,
            "wasted_tokens": report.wasted_tokens,
            "wasted_token_share": report.wasted_token_share,
        }
        sys.stdout.write(msgspec.json.encode(body).decode() + "\n")
    else:
        console = Console()
        for violation in violations:
            console.print(str(violation), markup=False, highlight=False)
        console.print(f"{len(events):,} events, {len(violations)} violations")
        show_waste(console, report)
    if violations:
        raise typer.Exit(1)
