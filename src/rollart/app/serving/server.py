"""The server process: socket, key, signals, and the order of start and stop.

    bind ─► load the model ─► serve ─► SIGTERM or SIGINT: accept no more, finish what is in flight ─► stop the engine

A second signal stops waiting. Connections that neither complete a request nor read their answer are closed.
"""

import asyncio
import os
import secrets
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from rollart.app.serving.engine import ServingEngine
from rollart.app.serving.http import application
from rollart.app.serving.model import ServedModel, open_model
from rollart.app.serving.settings import ServeSettings
from rollart.backends.stores.memory import MemoryStore
from rollart.config.schema import PoolSettings
from rollart.distributed.inline import InlineRuntime
from rollart.types.errors import RequestError, WorkerLost

KEY = "ROLLART_API_KEY"
"""Environment variable with the key that clients must send."""
STALL_S = 30.0
LAST_WORDS_S = 5
"""Time for errors to reach the clients whose requests were not finished."""
SPARE_CONNECTIONS = 256
"""Connections beside those of all requests that are taken."""
REPORT_INTERVAL_S = 0.05
"""Twice as often a stream gets what was sampled meanwhile."""


def serve(path: Path, settings: ServeSettings, *, base: Path | None = None, name: str = "") -> None:
    """Serve the model of `path` until a signal; raises `WorkerLost` if the engine dies."""
    key = _key()
    with _bound(settings.host, settings.port) as listening, _interruptible():
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
        host, port = listening.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        _say(f"serving {served.name} at http://{shown}:{port}/v1, with a context of {info.max_context} tokens")
        await server.serve([listening])
        if engine.lost.done():
            raise WorkerLost(
                f"the engine died: {engine.lost.result()}. Its requests were answered with errors; start again"
            )
    finally:
        await runtime.close()


def _engine_settings(served: ServedModel, settings: ServeSettings) -> dict[str, Any]:
    pool = PoolSettings(slots=settings.slots, kv_mib=settings.kv_mib, dtype=settings.dtype, device=settings.device)
    return {
        "model": str(served.folder),
        "store": MemoryStore(),
        "pool": pool,
        "max_context": settings.max_context or served.default_context(),
        "progress_interval_s": REPORT_INTERVAL_S,
        "serve_folder_as": (0, 0),
    }


def _key() -> str:
    """The key from the environment, or a new one, which is shown once."""
    key = os.environ.get(KEY, "")
    if not key:
        key = secrets.token_urlsafe(32)
        _say(f"{KEY} is not set; the key of this server, until it stops, is {key}")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise RequestError(f"{KEY} has characters that a header cannot carry; use letters, digits and punctuation")
    return key


@contextmanager
def _bound(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that does not listen yet, so that a port in use is noticed before a model is loaded."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family)
    except OSError as error:
        raise RequestError(f"--host {host}: {error}; give an address of this machine") from error
    with bound:
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except OSError as error:
            raise RequestError(
                f"cannot listen on {host} port {port}: {error}; choose another with --port or --host"
            ) from error
        yield bound


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM acts like Ctrl-C until the server listens, so that temporary files are removed."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _say(text: str) -> None:
    sys.stderr.write(f"rollart: {text}\n")
    sys.stderr.flush()


class Server(uvicorn.Server):
    """Ends in order at the first SIGTERM or SIGINT, or when the engine is lost; at once at the second signal.

    In order: it accepts no more, and what is not finished after `grace_s` ends with an error for its client.
    """

    def __init__(self, config: uvicorn.Config, engine: ServingEngine, grace_s: float) -> None:
        super().__init__(config)
        self._engine = engine
        self._grace_s = grace_s
        engine.lost.add_done_callback(lambda _: self.leave())

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.leave)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def leave(self) -> None:
        if self.should_exit:
            self.force_exit = True
            self._engine.stop()
        else:
            self.should_exit = True
            asyncio.get_running_loop().call_later(self._grace_s, self._engine.stop)


class GuardedProtocol(H11Protocol):
    """Closes a connection that makes no progress for a while: headers that do not come, an answer that is not read.

    Bodies have a deadline of their own (`http`).
    """

    stall_s = STALL_S

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._seen: object = None
        self._look_again()

    def connection_lost(self, exc: Exception | None) -> None:
        self._watch.cancel()
        super().connection_lost(exc)

    def _look_again(self) -> None:
        self._watch = self.loop.call_later(self.stall_s, self._look)

    def _look(self) -> None:
        waits_for = self._waits_for()
        if waits_for is not None and waits_for == self._seen:
            self.transport.abort()
            return
        self._seen = waits_for
        self._look_again()

    def _waits_for(self) -> object:
        """What the client has to do next: the same object or number as long as it does not; None if it is our turn."""
        unread = self.transport.get_write_buffer_size()
        if unread:
            return unread
        if self.cycle is None or self.cycle.response_complete:
            return (self.cycle,)
        return None
