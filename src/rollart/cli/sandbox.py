"""`rollart sandbox`: what sandboxes start from."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from rollart.backends.sandboxes.debian import make_root

app = typer.Typer(no_args_is_help=True, help="Make what sandboxes start from.")


@app.callback()
def sandboxes() -> None:
    """Make what sandboxes start from."""


@app.command()
def root(
    out: Annotated[Path, typer.Argument(help="A new folder.")],
    packages: Annotated[
        str, typer.Option(help="Debian packages, separated by commas; a shell and its usual commands are always there.")
    ] = "",
) -> None:
    """Make a root file system from Debian packages, as a base of sandboxes (docs/sandbox.md).

    Example: rollart sandbox root roots/git --packages python3,git
    """
    names = [name for name in packages.replace(" ", ",").split(",") if name]
    count = make_root(names, out)
    sys.stdout.write(f"{out}: {count} packages\n")
