"""`rollart`: the command line. Exit codes: 0 success, 1 the run failed, 2 invalid request."""

import sys
from typing import Annotated

import typer

from rollart import __version__
from rollart.bench.commands import app as bench
from rollart.cli.audit import audit
from rollart.cli.cluster import app as cluster
from rollart.cli.deploy import app as deploy
from rollart.cli.doctor import doctor
from rollart.cli.env import app as env
from rollart.cli.eval import evaluate
from rollart.cli.fuzz import fuzz
from rollart.cli.init import app as init
from rollart.cli.model import app as model
from rollart.cli.report import report
from rollart.cli.reward import app as reward
from rollart.cli.sandbox import app as sandbox
from rollart.cli.serve import serve
from rollart.cli.sft import sft
from rollart.cli.sim import sim
from rollart.cli.train import train
from rollart.types.errors import RequestError, RollartError

app = typer.Typer(
    name="rollart",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"rollart {__version__}\n")
        raise typer.Exit


app.command()(sim)
app.command()(fuzz)
app.command()(audit)
app.command()(report)
app.command()(train)
app.command()(sft)
app.command("eval")(evaluate)
app.command()(serve)
app.command()(doctor)
app.add_typer(init, name="init")
app.add_typer(env, name="env")
app.add_typer(reward, name="reward")
app.add_typer(model, name="model")
app.add_typer(cluster, name="cluster")
app.add_typer(deploy, name="deploy")
app.add_typer(sandbox, name="sandbox")
app.add_typer(bench, name="bench")


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, help="Show the version and exit.", callback=_show_version)
    ] = False,
) -> None:
    """Train LLM agents by reinforcement learning on disaggregated hardware, for real or in virtual time."""


def main() -> None:
    """Run a command and exit with its code. Our own errors are one sentence on stderr; a bug is a traceback."""
    try:
        app()
    except RequestError as error:
        sys.stderr.write(f"rollart: {error}\n")
        sys.exit(2)
    except RollartError as error:
        sys.stderr.write(f"rollart: {type(error).__name__}: {error}\n")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.stderr.write("rollart: interrupted\n")
        sys.exit(1)
