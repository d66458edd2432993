"""`rollart reward platform`: one reward function on Ray Serve, with as many replicas as calls need, down to none.

    client ──HTTP──► Endpoint, FunctionService (this process) ──► ServePlatform ──► replicas, one call at a time each

Secret, idempotency, limits and the OpenAPI document are those of every other target; only the executor differs.
"""

import asyncio
import os
import signal
from contextlib import ExitStack
from pathlib import Path

import msgspec

from rollart.app.cluster import connected
from rollart.app.functions.executor import Executed, failure
from rollart.app.functions.server import serve_on
from rollart.app.serving.listening import bound, interruptible, secret_of
from rollart.distributed.ray_local import LocalRay, environment
from rollart.distributed.serve_platform import (
    SERVE_ENVIRONMENT,
    CallLost,
    PlatformSettings,
    ServePlatform,
    started,
)
from rollart.gateway.functions.requests import Secret
from rollart.ports.reward import RewardKind
from rollart.ports.reward_call import RewardCaller
from rollart.types.errors import RuntimeLost
from rollart.types.reward_wire import FunctionCall

REPLICA = "rollart.app.functions.replica:ReplicaFunction"
QUEUE = 4096
"""Calls that may wait for a replica; more get status 429."""
ADVICE = "Start the platform again; calls that had no answer are tried again by their clients"
FILE_SUFFIXES = (".py", ".toml")


class PlatformExecutor:
    """Runs calls on a platform. A replica that dies costs its call an attempt."""

    can_stop = False

    def __init__(self, path: str, kind: RewardKind, platform: ServePlatform, concurrency: int) -> None:
        self.path = path
        self.kind = kind
        self.concurrency = concurrency
        self.queue = QUEUE
        self._platform = platform
        self._executed = 0
        self._cold_starts = 0
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._watching = asyncio.create_task(self._platform.watch())

    async def run(self, call: FunctionCall) -> Executed:
        try:
            executed = msgspec.json.decode(await self._platform.call(msgspec.json.encode(call)), type=Executed)
        except CallLost as lost:
            return Executed(failure(call, f"its replica was lost: {lost}", retry=True), "", cold=False)
        self._executed += 1
        self._cold_starts += executed.cold
        return executed

    def report(self) -> dict[str, float]:
        return self._platform.report() | {"executed": self._executed, "cold_starts": self._cold_starts}

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)


def serve_platform(
    function: str,
    host: str,
    port: int,
    settings: PlatformSettings,
    *,
    secret_env: str,
    grace_s: int,
    address: str | None = None,
) -> None:
    """Serve the function with this factory path until a signal; on the cluster at `address`, or on a Ray of its own."""
    kind = RewardCaller(function).kind  # first: a path that is wrong is noticed before anything starts
    secret = Secret(secret_of(secret_env), secret_env)
    with ExitStack() as stack:
        listening = stack.enter_context(bound(host, port))
        stack.enter_context(interruptible())
        stack.enter_context(environment(SERVE_ENVIRONMENT))
        ray = stack.enter_context(LocalRay(advice=ADVICE) if address is None else connected(address))
        path = _everywhere(function) if address is None else function
        platform = stack.enter_context(started(REPLICA, {"function": path}, settings, shared=address is not None))
        executor = PlatformExecutor(function, kind, platform, settings.max_replicas)
        if ray is not None:
            ray.when_lost(lambda: os.kill(os.getpid(), signal.SIGTERM))
        asyncio.run(serve_on(listening, executor, secret, grace_s))
        if ray is not None and (cause := ray.lost()):
            raise RuntimeLost(f"{cause}. {ADVICE}")


def _everywhere(function: str) -> str:
    """The path for processes with another working directory."""
    place, _, name = function.rpartition(":")
    return f"{Path(place).resolve()}:{name}" if place.endswith(FILE_SUFFIXES) else function
