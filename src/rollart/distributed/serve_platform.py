"""Ray Serve as a platform for functions: replicas start when calls wait, and end when there are none, down to zero.

    call ──(in order, at most one per replica)──► Serve's handle ──► replica: one object, one call at a time
                                                     │ calls that run or wait
                                                     ▼
                                              Serve's controller: replicas wanted = calls, at most `max_replicas`

Invariants: calls go through Serve's handle, its HTTP proxies are off, and the server that Serve starts in every replica
listens on the address of its node only, so all is as private as the Ray that this process is connected to. A replica
that is not needed any more finishes its call first. Replicas of this platform end with it; on a cluster, one that works
ends after its call.
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

logger = logging.getLogger(__name__)
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
"""Maximum back-off while a call waits for a free replica."""
DRAIN_S = 3600.0
"""Limit of the call that a replica finishes after Serve has chosen to stop it: Serve stops the newest, idle or not."""
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
        from ray.exceptions import RayError
        from ray.serve.exceptions import RayServeException

        before = time.monotonic()
        while True:
            try:
                self._replicas = await asyncio.to_thread(self._count)
            except (RayError, RayServeException) as error:  # Serve's controller starts again, for example
                logger.warning("replicas cannot be counted, the last number stands: %s", error)
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
def started(
    factory: str, arguments: Mapping[str, Any], settings: PlatformSettings, *, shared: bool
) -> Iterator[ServePlatform]:
    """A platform whose replicas hold one object of this factory each: an async function from bytes to bytes.

    `shared`: the Ray is a cluster that outlives this platform.
    """
    with environment(SERVE_ENVIRONMENT):
        from ray import serve
        from ray.exceptions import RayError
        from ray.serve.exceptions import RayServeException

        from rollart.distributed.serve_router import deployment

        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        name = f"rollart-{secrets.token_hex(4)}"
        try:
            try:
                quiet = {"log_level": "ERROR", "enable_access_log": False}
                serve.start(proxy_location="Disabled", logging_config=quiet)
                handle = serve.run(deployment(factory, arguments, settings), name=name, route_prefix=None)
            except (RayError, RayServeException, RuntimeError, ValueError) as error:
                raise RunError(f"Ray Serve did not start: {type(error).__name__}: {error}") from error
            yield ServePlatform(handle, name)
            handle.shutdown()  # its router asks Serve's controller for news
        finally:
            if shared:  # the end of a private Ray is that of all its processes
                _remove(name)


def _remove(name: str) -> None:
    """Delete the application, and Serve where no other application of the cluster uses it."""
    from ray import serve
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    try:
        serve.delete(name, _blocking=False)  # its busy replicas finish their calls
        if not set(serve.status().applications) - {name}:
            serve.shutdown()
    except (RayError, RayServeException) as error:
        logger.warning("the application %s is left on the cluster: %s; `serve shutdown` removes it", name, error)


class Replica:
    """What runs in a replica's process."""

    def __init__(self, factory: str, arguments: Mapping[str, Any]) -> None:
        _keep_to_its_node()
        build: Callable[..., Any] = load(factory)
        self._object = build(**arguments)

    async def __call__(self, argument: bytes) -> bytes:
        return bytes(await self._object(argument))


def _keep_to_its_node() -> None:
    """Have the server that Serve starts in this process listen on the node's address, not on all interfaces.

    Serve has no setting for it. It starts the server after it has made the object of the deployment.
    """
    import ray
    from ray.serve._private import replica

    # Private: the minor version of Ray is pinned, and a test looks at the sockets.
    bind = replica.add_port_to_grpc_server
    node = ray.util.get_node_ip_address()
    address = f"[{node}]:0" if ":" in node else f"{node}:0"
    replica.add_port_to_grpc_server = lambda server, _: bind(server, address)
