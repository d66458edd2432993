"""`rollart bench`: one command per benchmark."""

import typer

from rollart.bench.affinity import affinity
from rollart.bench.control import control
from rollart.bench.engine import engine
from rollart.bench.env import env
from rollart.bench.learn import learn
from rollart.bench.loop import loop
from rollart.bench.modes import modes
from rollart.bench.ray import ray
from rollart.bench.reward import reward
from rollart.bench.sandbox import sandbox
from rollart.bench.suite import all_
from rollart.bench.train import train
from rollart.bench.trl import trl

app = typer.Typer(help="Measure rollart itself.", no_args_is_help=True, add_completion=False)
for command in (control, engine, env, train, loop, modes, affinity, ray, trl, learn, reward, sandbox):
    app.command()(command)
app.command("all")(all_)


@app.callback()
def bench() -> None:
    """Measure rollart itself."""
