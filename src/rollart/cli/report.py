"""`rollart report`: the page of a run."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rollart.cli.report_page import PAGE, write_page
from rollart.cli.running import read_config
from rollart.types.errors import RequestError


def report(
    run: Annotated[Path, typer.Argument(help="A run folder: finished, unfinished or killed.")],
    out: Annotated[Path | None, typer.Option(help=f"Where to write it; {PAGE} in the run folder by default.")] = None,
) -> None:
    """Write a run as one page: curves, timeline, idle time, failures, trajectories token by token. Needs no network.

    Example: rollart report runs/quickstart-1
    """
    try:
        path = write_page(run, read_config(run), out)
    except OSError as error:
        raise RequestError(f"{out or run / PAGE} cannot be written ({error}); make room, or use --out") from error
    Console().print(str(path), markup=False, highlight=False, soft_wrap=True)
