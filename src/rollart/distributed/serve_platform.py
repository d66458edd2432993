"""Ray Serve as a platform for functions: replicas start when calls wait, and end when there are none, down to zero.

    call ──(in order, at most one per replica)──► Serve's handle ──► replica: one object, one call at a time
                                                     │ calls that run or wait
                                                     ▼
                                              Serve's controller: replicas wanted = calls, at most `max_replicas`

Invariants: Serve listens on no address, because calls go through its handle and its HTTP proxies are off; its processes
are those of the Ray that this process is connected to, so they are as private as that. Replicas of this platform end
with it.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from rollart.distributed.ray_local import environment
from rollart.ports.factory import load
from rollart.types.errors import RunError

SERVE_ENVIRONMENT = {
    # A busy machine may take longer than Serve's 0.1 s to answer a probe, and each that is late warns.
    "RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "2",
    "RAY_SERVE_MAX_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "10",
}
"""To be set before Serve is imported, and for its processes."""
METRICS_S = 0.2
"""Interval at which the handle reports calls."""
LOOK_BACK_S = 0.3
"""Period of which Serve takes the mean."""
BACKOFF_S = 0.01
MAX_BACKOFF_S = 0.1
"""Between looks for a free replica, while fewer run than there are calls for. Others wait before the handle."""
STOP_S = 2.0
"""Time that a replica that is not needed any more has to stop."""
SAMPLE_S = 0.25


class PlatformSettings(NamedTuple):
    max_replicas: int
    idle_s: float
    """How long a replica is kept without calls."""
    cpus: float
    """CPUs that a replica reserves."""


class CallLost(Exception):
    """The replica of a call died; another one can take it."""


class ServePlatform:
    """Runs objects of one factory. Needs a Ray; use it in `started` and on one event loop."""

    def __init__(self, handle: Any, name: str) -> None:
        self._handle = handle
        self._name = name
        self._replica_s = 0.0
        self._replicas = 0
        self._most = 0

    async def call(self, argument: bytes) -> bytes:
        """Call an object, in a replica that is free or will start."""
        from ray.exceptions import RayError
        from ray.serve.exceptions import RayServeException

        try:
            return bytes(await self._handle.remote(argument))
        except (RayError, RayServeException) as error:
            raise CallLost((str(error).strip().splitlines() or [type(error).__name__])[0]) from error

    async def watch(self) -> None:
        """Count replicas and their seconds until cancelled: those that start and stop included, they are paid for."""
        before = time.monotonic()
        while True:
            self._replicas = await asyncio.to_thread(self._count)
            now = time.monotonic()
            self._replica_s += self._replicas * (now - before)
            self._most = max(self._most, self._replicas)
            before = now
            await asyncio.sleep(SAMPLE_S)

    def report(self) -> dict[str, float]:
        """Replicas now, the most so far, and replica-seconds so far; as `watch` counts them."""
        return {"replicas": self._replicas, "max_replicas": self._most, "replica_s": round(self._replica_s, 3)}

    def _count(self) -> int:
        from ray import serve

        application = serve.status().applications.get(self._name)
        states = [] if application is None else [each.replica_states for each in application.deployments.values()]
        return sum(number for by_state in states for number in by_state.values())


@contextmanager
def started(factory: str, arguments: Mapping[str, Any], settings: PlatformSettings) -> Iterator[ServePlatform]:
    """A platform whose replicas hold one object of this factory each: an async function from bytes to bytes."""
    with environment(SERVE_ENVIRONMENT):
        from ray import serve
        from ray.exceptions import RayError

        from rollart.distributed.serve_router import deployment

        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        name = f"rollart-{secrets.token_hex(4)}"
        try:
            serve.start(proxy_location="Disabled", logging_config={"log_level": "ERROR", "enable_access_log": False})
            handle = serve.run(deployment(factory, arguments, settings), name=name, route_prefix=None)
        except (RayError, RuntimeError, ValueError) as error:
            raise RunError(f"Ray Serve did not start: {type(error).__name__}: {error}") from error
        try:
            yield ServePlatform(handle, name)
        finally:
            serve.delete(name)
            if not serve.status().applications:
                serve.shutdown()  # nobody else on this cluster uses it


class Replica:
    """What runs in a replica's process."""

    def __init__(self, factory: str, arguments: Mapping[str, Any]) -> None:
        build: Callable[..., Any] = load(factory)
        self._object = build(**arguments)

    async def __call__(self, argument: bytes) -> bytes:
        return bytes(await self._object(argument))
