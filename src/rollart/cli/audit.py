"""`rollart audit`: whether a run kept the rules, from its journal alone."""

import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from rollart.cli.render import show_waste
from rollart.cli.train import JOURNAL
from rollart.observe.audit import Auditor, Violation
from rollart.observe.journal import read_journal
from rollart.observe.report import Report, make_report
from rollart.types.journal import JournalEvent


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
    report = _report(events, violations)
    if json:
        body: dict[str, Any] = {
            "events": len(events),
            "violations": [{"rule": v.rule, "event": v.event, "what": v.what} for v in violations],
        }
        if report is not None:
            body |= {
                "ended": report.ended,
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
        if report is not None:
            show_waste(console, report)
    if violations:
        raise typer.Exit(1)


def _report(events: list[JournalEvent], violations: list[Violation]) -> Report | None:
    """The figures of a run; none of a journal with holes, where events are about what was never started."""
    try:
        return make_report(events)
    except KeyError:
        if not violations:
            raise
        return None
