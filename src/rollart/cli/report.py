"""`rollart report`: the HTML page of a run."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rollart.app.report_page import PAGE, write_page
from rollart.app.running import read_config
from rollart.types.errors import RequestError


def report(
    run: Annotated[Path, typer.Argument(help="A run folder: finished, unfinished or killed.")],
    out: Annotated[Path | None, typer.Option(help=f"Output file; {PAGE} in the run folder by default.")] = None,
) -> None:
    """Write a run as one HTML page: curves, timeline, idle time, failures, trajectories token by token. Works offline.

    Example: rollart report runs/quickstart-1
    """
    try:
        path = write_page(run, read_config(run), out)
    except OSError as error:
        raise RequestError(f"{out or run / PAGE} cannot be written ({error}); free space, or use --out") from error
    Console().print(str(path), markup=False, highlight=False, soft_wrap=True)
