"""`rollart bench reward`: a function that scales from zero, against a pool that is always there."""

import importlib.util
import json as jsonlib
import sys
from typing import Annotated

import typer

from rollart.bench.common import read_tables, say
from rollart.types.errors import RequestError

WORK = "reward.toml"
ALL_CALLS = 5000


def reward(
    calls: Annotated[int, typer.Option(min=20, help="Calls of the trace; fewer shorten it.")] = ALL_CALLS,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout and nothing else.")] = False,
) -> None:
    """Rewards of a bursty trace on `rollart reward platform`, called as a reward worker does. Takes ten minutes.

    lost and doubled: calls without an answer, and those computed or answered more than once. added_ms_p50: median of
    what a call takes beyond the time of the function, with no other call in flight and a warm replica.
    paid_over_work: seconds of replicas, from the decision to start one until it is gone, over seconds of work.
    utilisation is the inverse; dedicated_utilisation that of a pool of as many replicas as the platform used at most,
    all the time. over_dedicated: their ratio.

    Example: rollart bench reward --calls 500
    """
    if importlib.util.find_spec("fastapi") is None:
        raise RequestError("this needs Ray Serve; install it with: pip install 'rollart[functions]'")
    from rollart.bench.reward_run import measure, trace_of  # here: the parts of a real run

    tables = read_tables(WORK)
    result = measure(trace_of(tables["trace"], calls / ALL_CALLS), tables["platform"])
    if json:
        sys.stdout.write(jsonlib.dumps(result) + "\n")
    else:
        for name, value in result.items():
            say(f"{name}: {value}")
