"""`rollart audit`: check a run's invariants from its journal alone."""

import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from rollart.app.run_folder import JOURNAL
from rollart.cli.render import show_waste
from rollart.observe.journal import fold_journal


def audit(
    run: Annotated[Path, typer.Argument(help="A run folder, its journal, or a trace of `rollart fuzz`.")],
    json: Annotated[bool, typer.Option("--json", help="Print only one JSON object on stdout.")] = False,
) -> None:
    """Check conservation, staleness, shares, versions and lineage of a run, and show what was wasted and why.

    Example: rollart audit runs/frozenlake-1
    """
    path = run / JOURNAL if run.is_dir() else run
    pruned, folds = fold_journal(path)
    violations, report = folds.finish()
    events, unlisted = folds.auditor.count, folds.auditor.unlisted
    if json:
        body: dict[str, Any] = {
            "events": events,
            "pruned": pruned,
            "violations": [{"rule": v.rule, "event": v.event, "what": v.what} for v in violations],
            "unlisted_violations": unlisted,
        }
        if report is not None:
            body |= {
                "ended": report.ended,
                "stop": report.stop,
                "open_trajectories": report.open_trajectories,
                "outcomes": report.outcomes,
                "wasted_tokens": report.wasted_tokens,
                "wasted_token_share": report.wasted_token_share,
            }
        sys.stdout.write(msgspec.json.encode(body).decode() + "\n")
    else:
        console = Console()
        for violation in violations:
            console.print(str(violation), markup=False, highlight=False)
        if unlisted:
            console.print(f"… and {unlisted:,} more")
        note = f" ({pruned:,} of them pruned)" if pruned else ""
        console.print(f"{events:,} events{note}, {len(violations) + unlisted} violations")
        if report is not None:
            if report.stop is None:
                console.print(f"the run did not end: {report.open_trajectories} trajectories open")
            show_waste(console, report)
    if violations:
        raise typer.Exit(1)
