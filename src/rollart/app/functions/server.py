"""`rollart reward serve`: one reward function on uvicorn, until Ctrl-C or SIGTERM."""

import asyncio
import resource
import socket

import uvicorn

from rollart.app.functions.asgi import AsgiApplication
from rollart.app.functions.endpoint import Endpoint
from rollart.app.functions.executor import Executor, LocalExecutor
from rollart.app.functions.service import FunctionService
from rollart.app.serving.listening import GracefulServer, GuardedProtocol, bound, interruptible, secret_of, url_of
from rollart.gateway.functions.requests import Secret

SECRET = "ROLLART_REWARD_SECRET"
"""Environment variable with the secret that clients must know."""
KEEP_ALIVE_S = 20
"""More than clients keep unused connections, so that they close them first and none is closed under a request."""
SPARE_CONNECTIONS = 4096
"""Connections without a call that runs or waits. More are turned away by uvicorn, in a form of its own."""
MAX_DESCRIPTORS = 65536


def serve_function(function: str, host: str, port: int, *, secret_env: str, concurrency: int, grace_s: int) -> None:
    """Serve the function with this factory path."""
    executor = LocalExecutor(function, concurrency)  # first: a path that is wrong is noticed before anything starts
    secret = Secret(secret_of(secret_env), secret_env)
    with bound(host, port) as listening, interruptible():
        asyncio.run(serve_on(listening, executor, secret, grace_s))


async def serve_on(listening: socket.socket, executor: Executor, secret: Secret, grace_s: int) -> None:
    """Serve until a signal."""
    _allow_connections()
    app = AsgiApplication(lambda: Endpoint(FunctionService(executor), secret))
    server = GracefulServer(
        uvicorn.Config(
            app,
            http=GuardedProtocol,
            ws="none",
            lifespan="on",
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=executor.concurrency + executor.queue + SPARE_CONNECTIONS,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=grace_s,
        )
    )
    server.ready = f"serving {executor.path} at {url_of(listening)}, {executor.concurrency} calls at a time"
    await server.serve([listening])


def _allow_connections() -> None:
    """Raise this process's limit of open files, which is often 1,024, as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
