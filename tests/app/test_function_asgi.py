"""The ASGI side of served reward functions: what is read, what is not, and `rollart reward serve` as a process."""

import asyncio
import json
import os
import re
import resource
import signal
import socket
import subprocess
import urllib.error
import urllib.request

import pytest
from real_cli import COMMAND
from served_function import PATIENCE_S, SECRET, call, request, write_functions

pytest.importorskip("uvicorn", reason="uvicorn is not installed: pip install 'rollart[serve]'")

from rollart.app.functions import asgi
from rollart.app.functions.asgi import AsgiApplication
from rollart.app.functions.endpoint import Endpoint
from rollart.app.functions.executor import LocalExecutor
from rollart.app.functions.server import MAX_DESCRIPTORS, serve_function, serve_on
from rollart.app.functions.service import FunctionService
from rollart.app.serving.listening import GracefulServer
from rollart.gateway.functions.requests import SIGNATURE, Secret
from rollart.ports.factory import load
from rollart.types.errors import RequestError
from rollart.types.reward_wire import MAX_REQUEST_BYTES

BEARER = (b"authorization", b"Bearer " + SECRET.encode())


def answer(tmp_path, parts, *headers, method="POST", body_timeout_s=PATIENCE_S):
    """Status, and number of parts that were read: bytes, None for a client that leaves, or ... for silence."""
    parts = list(parts)
    given = len(parts)
    sent = []

    async def receive():
        part = parts.pop(0) if parts else ...
        if part is ...:
            await asyncio.Event().wait()
        if part is None:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": part, "more_body": bool(parts)}

    async def send(message):
        sent.append(message)

    async def whole():
        executor = LocalExecutor(f"{write_functions(tmp_path)}:correct", 2)
        app = AsgiApplication(
            lambda: Endpoint(FunctionService(executor), Secret(SECRET)), body_timeout_s=body_timeout_s
        )
        await app({"type": "http", "method": method, "path": "/", "headers": headers}, receive, send)

    asyncio.run(whole())
    return (sent[0]["status"] if sent else None), given - len(parts)


def test_a_body_in_pieces(tmp_path):
    body = request()
    assert answer(tmp_path, [body[:10], body[10:50], body[50:]], BEARER) == (200, 3)


def test_nothing_is_read_of_strangers_nor_of_what_is_known_to_be_too_large(tmp_path):
    assert answer(tmp_path, [request()]) == (401, 0)
    assert answer(tmp_path, [b""], BEARER, method="GET") == (405, 0)
    assert answer(tmp_path, [b""], BEARER, (b"content-length", str(MAX_REQUEST_BYTES + 1).encode())) == (413, 0)


def test_a_body_that_grows_too_large_is_refused_on_the_way(tmp_path):
    parts = [b"x" * MAX_REQUEST_BYTES, b"x", b"x"]
    assert answer(tmp_path, parts, BEARER) == (413, 2)


def test_clients_that_leave_or_stop_sending(tmp_path):
    assert answer(tmp_path, [b"{", None], BEARER) == (None, 2)
    assert answer(tmp_path, [b"{", ...], BEARER, body_timeout_s=0.01) == (408, 2)


def test_a_client_that_leaves_ends_its_call(tmp_path):
    async def whole():
        file = write_functions(tmp_path)
        module = load(f"{file}:correct").__globals__
        service = FunctionService(LocalExecutor(f"{file}:endless", 1))
        parts = [{"type": "http.request", "body": request()}]

        async def receive():
            if parts:
                return parts.pop()
            assert await asyncio.to_thread(module["ENTERED"].acquire, timeout=PATIENCE_S)
            return {"type": "http.disconnect"}

        async def send(message):
            raise AssertionError(message)

        app = AsgiApplication(lambda: Endpoint(service, Secret(SECRET)))
        await app({"type": "http", "method": "POST", "path": "/", "headers": [BEARER]}, receive, send)
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)
        return len(service._running)

    assert asyncio.run(whole()) == 0


def test_bodies_together_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(asgi, "MAX_HELD_BYTES", 5)
    assert answer(tmp_path, [b"123", b"456", b""], BEARER) == (429, 2)


def test_signatures_that_cannot_be_right_are_refused_before_the_body(tmp_path):
    for header in (b"t=1,v1=", b"t=" + b"9" * 5000 + b",v1=" + b"0" * 64, b"t=1,v1=" + b"0" * 64, b""):
        assert answer(tmp_path, [request()], (SIGNATURE.encode(), header)) == (401, 0)


def test_as_many_connections_as_calls_may_wait(tmp_path, monkeypatch):
    served = []

    async def serve(self, sockets):  # noqa: ARG001
        served.append(self.config.limit_concurrency)

    monkeypatch.setattr(GracefulServer, "serve", serve)
    executor = LocalExecutor(f"{write_functions(tmp_path)}:correct", 8)
    executor.queue = 10_000
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, before[1]), before[1]))
    try:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            asyncio.run(serve_on(listening, executor, Secret(SECRET), 1))
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(before[1], MAX_DESCRIPTORS)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert served[0] > 8 + 10_000 + 1024


def test_the_command_serves_until_sigterm(tmp_path):
    write_functions(tmp_path)
    command = [*COMMAND, "reward", "serve", "served_rewards.py:correct", "--port", "0", "--secret-env", "MY_SECRET"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=os.environ | {"MY_SECRET": SECRET}, stderr=subprocess.PIPE, text=True
    )
    try:
        line = process.stderr.readline()
        url = re.search(r"http://127\.0\.0\.1:\d+", line)[0]
        headers = {"Authorization": f"Bearer {SECRET}", "Content-Type": "application/json"}
        asked = urllib.request.Request(f"{url}/", request(call(1), call(2)), headers)
        with urllib.request.urlopen(asked, timeout=PATIENCE_S) as response:
            assert len(json.loads(response.read())["answers"]) == 2
        with urllib.request.urlopen(f"{url}/health", timeout=PATIENCE_S) as response:
            assert json.loads(response.read()) == {"status": "ok"}
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{url}/", b"{}", timeout=PATIENCE_S)
        assert refused.value.code == 401
        refused.value.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
        assert SECRET not in line + process.stderr.read()
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_a_wrong_path_is_refused_before_anything_starts(tmp_path):
    with pytest.raises(RequestError, match="corect"):
        serve_function(
            f"{write_functions(tmp_path)}:corect", "127.0.0.1", 0, secret_env="MY_SECRET", concurrency=1, grace_s=1
        )
