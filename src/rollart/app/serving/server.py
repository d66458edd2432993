"""The server process: the order of start and stop.

    bind ─► load the model ─► serve ─► SIGTERM or SIGINT: accept no more, finish what is in flight ─► stop the engine

A second signal stops waiting.
"""

import asyncio
import socket
from pathlib import Path
from typing import Any

import uvicorn

from rollart.app.serving.engine import ServingEngine
from rollart.app.serving.http import application
from rollart.app.serving.listening import GracefulServer, GuardedProtocol, bound, interruptible, say, secret_of, url_of
from rollart.app.serving.model import ServedModel, open_model
from rollart.app.serving.settings import ServeSettings
from rollart.backends.stores.memory import MemoryStore
from rollart.config.pools import PoolSettings
from rollart.distributed.inline import InlineRuntime
from rollart.types.errors import WorkerLost

KEY = "ROLLART_API_KEY"
"""Environment variable with the key that clients must send."""
LAST_WORDS_S = 5
"""Time for errors to reach the clients whose requests were not finished."""
SPARE_CONNECTIONS = 256
"""Connections beside those of all requests that are taken."""
REPORT_INTERVAL_S = 0.05
"""Twice as often a stream gets what was sampled meanwhile."""


def serve(path: Path, settings: ServeSettings, *, base: Path | None = None, name: str = "") -> None:
    """Serve the model of `path` until a signal; raises `WorkerLost` if the engine dies."""
    key = secret_of(KEY)
    with bound(settings.host, settings.port) as listening, interruptible():
        asyncio.run(_serve(path, settings, key, listening, base, name))


async def _serve(
    path: Path, settings: ServeSettings, key: str, listening: socket.socket, base: Path | None, name: str
) -> None:
    runtime = InlineRuntime()
    try:
        with open_model(path, base=base, name=name) as served:
            # Once it has joined, the engine holds the weights: the folder may go.
            engine = ServingEngine(runtime, _engine_settings(served, settings), queue=settings.queue)
            info = await engine.start()
        server = Server(
            uvicorn.Config(
                application(served, engine, key),
                http=GuardedProtocol,
                ws="none",
                lifespan="off",
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                limit_concurrency=engine.capacity + SPARE_CONNECTIONS,
                timeout_graceful_shutdown=settings.grace_s + LAST_WORDS_S,
            ),
            engine,
            settings.grace_s,
        )
        server.ready = f"serving {served.name} at {url_of(listening)}/v1, with a context of {info.max_context} tokens"
        await server.serve([listening])
        if engine.lost.done():
            raise WorkerLost(
                f"the engine died: {engine.lost.result()}. Its requests were answered with errors; start again"
            )
    finally:
        await runtime.close()


def _engine_settings(served: ServedModel, settings: ServeSettings) -> dict[str, Any]:
    context = settings.max_context or served.default_context()
    if context > served.shape.positions:
        say(f"the model was trained for {served.shape.positions} positions; text beyond them may make no sense")
    pool = PoolSettings(slots=settings.slots, kv_mib=settings.kv_mib, dtype=settings.dtype, device=settings.device)
    return {
        "model": str(served.folder),
        "store": MemoryStore(),
        "pool": pool,
        "max_context": context,
        "progress_interval_s": REPORT_INTERVAL_S,
        "serve_folder_as": (0, 0),
    }


class Server(GracefulServer):
    """Ends in order at the first SIGTERM or SIGINT, or when the engine is lost; at once at the second signal.

    In order: it accepts no more, and what is not finished after `grace_s` ends with an error for its client.
    """

    def __init__(self, config: uvicorn.Config, engine: ServingEngine, grace_s: float) -> None:
        super().__init__(config)
        self._engine = engine
        self._grace_s = grace_s
        engine.lost.add_done_callback(lambda _: self.leave())

    def leave(self) -> None:
        if self.should_exit:
            self._engine.stop()
        else:
            asyncio.get_running_loop().call_later(self._grace_s, self._engine.stop)
        super().leave()
