"""The run of `rollart bench reward`: a platform in a process of its own, a client, and a trace in real time."""

import asyncio
import json
import os
import re
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec

from rollart.backends.rewards.remote_client import RemoteClient, RemoteLimits
from rollart.backends.rewards.remote_exchange import RemoteExchange
from rollart.backends.rewards.remote_secret import BEARER, RemoteSecret
from rollart.bench.common import say
from rollart.config.reward_place import REMOTE_SLOTS
from rollart.types.errors import RunError
from rollart.types.ids import PromptId, TrajectoryId
from rollart.types.messages import EpisodeRecord, Scored, ScoreFailed, ScoreRequest
from rollart.types.reward_use import RewardUse
from rollart.types.reward_wire import FunctionCall
from rollart.types.transcript import Transcript

FUNCTION = "rollart.bench.reward_function:work"
SECRET = "ROLLART_BENCH_REWARD_SECRET"
DEADLINE_S = 600.0
READY = re.compile(r"serving \S+ at (http://\S+),")
LOOK_S = 0.5


class Arrival(NamedTuple):
    """A call of the trace."""

    at_s: float
    work_s: float


class Trace(NamedTuple):
    arrivals: tuple[Arrival, ...]
    length_s: float


class Answered(NamedTuple):
    """A call and what became of it."""

    answer: Scored | ScoreFailed
    use: RewardUse
    took_s: float
    alone: bool
    """No other call was in flight when it was made."""


def trace_of(table: Mapping[str, Any], share: float = 1.0) -> Trace:
    """The calls of a trace in their order; with a `share` below 1, fewer calls in as much less time.

    >>> table = {"bursts": 2, "period_s": 100.0, "burst_calls": 4, "burst_s": 8.0, "stragglers": 1,
    ...          "stragglers_after_s": 50.0, "stragglers_every_s": 1.0, "work_s": [0.1, 0.2]}
    >>> [arrival.at_s for arrival in trace_of(table).arrivals]
    [0.0, 2.0, 4.0, 6.0, 50.0, 100.0, 102.0, 104.0, 106.0, 150.0]
    """
    times = []
    for burst in range(table["bursts"]):
        start_s = burst * table["period_s"] * share
        calls = max(1, round(table["burst_calls"] * share))
        late = max(1, round(table["stragglers"] * share))
        times += [start_s + index * table["burst_s"] * share / calls for index in range(calls)]
        first_s = start_s + table["stragglers_after_s"] * share
        times += [first_s + index * table["stragglers_every_s"] for index in range(late)]
    work_s = table["work_s"]
    arrivals = [Arrival(at_s, work_s[index % len(work_s)]) for index, at_s in enumerate(sorted(times))]
    return Trace(tuple(arrivals), table["bursts"] * table["period_s"] * share)


def measure(trace: Trace, platform: Mapping[str, Any]) -> dict[str, float | None]:
    os.environ.setdefault(SECRET, secrets.token_urlsafe(32))  # where client and platform look for it
    with running(platform) as url:
        say(f"{len(trace.arrivals)} calls in {trace.length_s:.0f} s")
        answered = asyncio.run(replay(trace, url))
        say("waiting until the last replica has gone")
        report = when_idle(url)
    # One that still stops while its successor starts is paid for, and no part of a pool of the same strength.
    report["max_replicas"] = min(report["max_replicas"], platform["max_replicas"])
    return figures(answered, len(trace.arrivals), trace.length_s, report)


def figures(
    answered: Sequence[Answered], calls: int, length_s: float, report: Mapping[str, float]
) -> dict[str, float | None]:
    """The result; `report` is that of the platform after its last replica has gone."""
    # The reward is the time that the function took.
    scored = [(each, each.answer.values[0]) for each in answered if isinstance(each.answer, Scored)]
    work_s = sum(took_s for _, took_s in scored)
    added_s = [each.took_s - took_s for each, took_s in scored if each.alone and not each.use.cold_starts]
    times = Counter(each.answer.key for each in answered)
    repeated = sum(number - 1 for number in times.values())
    recomputed = max(0, round(report["executed"]) - calls)
    dedicated_s = report["max_replicas"] * length_s
    paid_s = report["replica_s"]
    return {
        "calls": calls,
        "lost": calls - len({each.answer.key for each, _ in scored}),
        "doubled": repeated + recomputed,
        "added_ms_p50": round(1000 * statistics.median(added_s), 3) if added_s else None,
        "paid_over_work": round(paid_s / work_s, 3),
        "utilisation": round(work_s / paid_s, 4),
        "dedicated_utilisation": round(work_s / dedicated_s, 4),
        "over_dedicated": round(dedicated_s / paid_s, 3),
        "max_replicas": report["max_replicas"],
        "cold_starts": report["cold_starts"],
    }


async def replay(trace: Trace, url: str) -> list[Answered]:
    """Make every call at its time and wait for all answers."""
    loop = asyncio.get_running_loop()
    answered: list[Answered] = []
    cold: dict[str, int] = {}

    def spent(route: str, use: RewardUse) -> None:
        cold[route] = cold.get(route, 0) + use.cold_starts

    exchange = RemoteExchange(url, RemoteSecret(SECRET, BEARER), connections=2 * REMOTE_SLOTS)
    client = RemoteClient(exchange, RemoteLimits(REMOTE_SLOTS), spent)
    done = asyncio.Event()
    open_calls = 0

    def call(number: int, arrival: Arrival) -> None:
        nonlocal open_calls
        began, alone = loop.time(), open_calls == 0
        open_calls += 1
        key = f"{number}/work"
        # A route per call, so that what is spent can be told apart.
        request = ScoreRequest(key, "bench", key, (EpisodeRecord(TrajectoryId(number), number),), DEADLINE_S)

        def finish(answer: Scored | ScoreFailed, use: RewardUse) -> None:
            nonlocal open_calls
            open_calls -= 1
            use.cold_starts += cold.get(request.route, 0)
            answered.append(Answered(answer, use, loop.time() - began, alone))
            if len(answered) == len(trace.arrivals):
                done.set()

        transcript = Transcript(
            task="bench",
            trajectory=TrajectoryId(number),
            prompt_id=PromptId(str(number)),
            seed=number,
            member=0,
            prompt={"work_s": arrival.work_s},
        )
        client.call(request, msgspec.json.encode(FunctionCall(key, (transcript,))), finish)

    start = loop.time()
    for number, arrival in enumerate(trace.arrivals):
        loop.call_at(start + arrival.at_s, call, number, arrival)
    await done.wait()  # every call has a deadline
    await asyncio.sleep(max(0.0, start + trace.length_s - loop.time()))
    await client.close()
    return answered


@contextmanager
def running(platform: Mapping[str, Any]) -> Iterator[str]:
    """The URL of a platform in a process of its own."""
    options = [f"--{name.replace('_', '-')}={value}" for name, value in platform.items()]
    command = [sys.executable, "-m", "rollart", "reward", "platform", FUNCTION, "--port=0", f"--secret-env={SECRET}"]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen([*command, *options], stderr=log, stdout=log)
        try:
            yield _url(process, log)
        finally:
            process.terminate()
            process.wait()


def _url(process: "subprocess.Popen[bytes]", log: Any) -> str:
    while True:
        ended = process.poll() is not None
        log.seek(0)
        said = log.read()
        found = READY.search(said)
        if found:
            return found[1]
        if ended:
            raise RunError(f"the platform did not start: {said.strip()}")
        time.sleep(LOOK_S)


def when_idle(url: str) -> dict[str, float]:
    """The report of the platform once it has no replica."""
    while True:
        with urllib.request.urlopen(f"{url}/health", timeout=DEADLINE_S) as response:
            report: dict[str, float] = json.loads(response.read())
        if not report["replicas"]:
            return report
        time.sleep(LOOK_S)
