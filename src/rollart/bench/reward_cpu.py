"""CPU time of the controller per reward call: asking, sending, receiving, accounting and entering the answer.

Real parts, with a runtime that encodes what is sent and decodes what comes back, as over a link, and answers everything
at once. Making the answers is not counted.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rollart.config.load import check
from rollart.config.schema import RunConfig
from rollart.control.context import Context
from rollart.control.fleet import Fleet, WorkerSpec
from rollart.control.rewards import POOL, RewardDispatch
from rollart.distributed.wire import decode, encode
from rollart.observe.journal import MemoryJournal
from rollart.ports.runtime import Listener
from rollart.types.ids import TrajectoryId, WorkerId
from rollart.types.messages import (
    EpisodeRecord,
    FunctionsUsed,
    RewardInfo,
    Role,
    Scored,
    ScoreRequest,
    WorkerCommand,
    WorkerEvent,
)
from rollart.types.placement import NOTHING, Needs
from rollart.types.reward_use import RewardUse, bucket

ROUTE = "task/judged"


class EchoRuntime:
    """Answers each request at the next pass of the loop (`ports.runtime.Runtime`)."""

    def __init__(self) -> None:
        self._listener: Listener | None = None
        self.uncounted_s = 0.0
        """CPU time spent on what a worker would do."""

    def listen(self, listener: Listener) -> None:
        self._listener = listener

    def spawn(
        self,
        worker: WorkerId,
        role: Role,  # noqa: ARG002
        factory: str,  # noqa: ARG002
        settings: Mapping[str, Any],  # noqa: ARG002
        *,
        python: str = "",  # noqa: ARG002
        needs: Needs = NOTHING,  # noqa: ARG002
    ) -> None:
        assert self._listener is not None
        asyncio.get_running_loop().call_soon(self._listener.joined, worker, RewardInfo(slots=64, elastic=True))

    def post(self, worker: WorkerId, commands: Sequence[WorkerCommand]) -> None:
        encode(commands)
        began = time.thread_time()
        keys = [command.key for command in commands if isinstance(command, ScoreRequest)]
        blobs = [encode(_answer(key)) for key in keys]
        self.uncounted_s += time.thread_time() - began
        for blob in blobs:
            asyncio.get_running_loop().call_soon(self._deliver, worker, blob)

    def stop(self, worker: WorkerId) -> None:
        pass

    async def close(self) -> None:
        pass

    def _deliver(self, worker: WorkerId, blob: bytes) -> None:
        assert self._listener is not None
        events: list[WorkerEvent] = [event for event in decode(blob) if isinstance(event, Scored | FunctionsUsed)]
        self._listener.events(worker, events)


def _answer(key: str) -> list[WorkerEvent]:
    use = RewardUse(calls=1, requests=1, bytes_out=4000, bytes_in=120, replica_s=0.5, latencies={bucket(0.5): 1})
    return [FunctionsUsed({ROUTE: use}), Scored(key, (1.0,))]


def controller_us_per_call(calls: int = 5000, in_flight: int = 256, transcript_bytes: int = 4000) -> float:
    """Microseconds of the controller's CPU per call, with that many calls at once for 64 slots."""
    return asyncio.run(_measured(calls, in_flight, transcript_bytes))


async def _measured(calls: int, in_flight: int, transcript_bytes: int) -> float:
    config = check(RunConfig, {"tasks": {"task": {}}, "pools": {"local": {}}})
    runtime, transcript = EchoRuntime(), bytes(transcript_bytes)
    context = Context(config, MemoryJournal())
    fleet = Fleet(context, runtime, [WorkerSpec("reward/0", Role.REWARD, POOL, "", {})])
    dispatch = RewardDispatch(context, fleet)
    done: asyncio.Future[None] = context.loop.create_future()
    asked = answered = 0

    def ask() -> None:
        nonlocal asked
        number, asked = asked, asked + 1
        record = EpisodeRecord(TrajectoryId(number), number, (0.0,), transcript=transcript)
        request = ScoreRequest(f"t{number}/judged", "task", "judged", (record,), 120.0)
        dispatch.ask(request, f"trajectory {number}", 120.0, arrived, done.set_exception)

    def arrived(_: Scored) -> None:
        nonlocal answered
        answered += 1
        if asked < calls:
            ask()
        elif answered == calls:
            done.set_result(None)

    fleet.start()
    await asyncio.sleep(0)
    began = time.thread_time()
    for _ in range(min(in_flight, calls)):
        ask()
    await done
    spent_s = time.thread_time() - began - runtime.uncounted_s
    await fleet.close()
    return spent_s / calls * 1e6
