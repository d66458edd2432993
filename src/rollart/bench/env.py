"""`rollart bench env`: what hosting an environment costs."""

import json as jsonlib
import sys
from typing import Annotated

import typer

from rollart.bench.common import show_figures


def env(
    environments: Annotated[int, typer.Option(min=1, help="Environments that play at the same time.")] = 1000,
    turns: Annotated[int, typer.Option(min=1, help="Turns of each of their episodes.")] = 40,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout and nothing else.")] = False,
) -> None:
    """CPU time of an environment step in workers, beyond its own. Takes about a minute.

    Many light environments answer as fast as they are asked, in workers of 64, as in a run. worker_us is the CPU time
    of a step, of all threads: the message, the thread, decoding the action, tokenising the observation. own_us is that
    of the environment alone, in a loop. hosting_us is the difference. With an interpreter of its own, the CPU time of
    its processes is included; interpreter_adds_us is what a step costs more than without.

    Example: rollart bench env --environments 100 --json
    """
    from rollart.bench.env_run import measure  # here, because other commands do not need its imports

    figures = measure(environments, turns)
    if json:
        sys.stdout.write(jsonlib.dumps(figures) + "\n")
    else:
        show_figures({f"{environments:,} environments": figures})
