"""`rollart init`: write a starting point."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from rollart.app.task_template import write_task

app = typer.Typer(no_args_is_help=True, help="Write a starting point.")


@app.callback()
def init() -> None:
    """Write a starting point."""


@app.command()
def task(
    name: Annotated[str, typer.Argument(help="Name of the task, and of the new folder.")],
    folder: Annotated[Path, typer.Option("--in", help="Where to put it; here by default.")] = Path(),
) -> None:
    """Write a package with a task that trains as it is: environment, test, config and README.

    Example: rollart init task maze && cd maze && rollart train config.toml --runtime inline
    """
    for path in write_task(name, folder):
        sys.stdout.write(f"{path}\n")
