"""Connections that make no progress are closed; those that do are not."""

import asyncio
import socket

import pytest

pytest.importorskip("uvicorn", reason="uvicorn is not installed: pip install 'rollart[serve]'")

import uvicorn
from scripted import KEY, PATIENCE_S, Script, engine, served

from rollart.app.serving import listening
from rollart.app.serving.http import application
from rollart.app.serving.listening import GracefulServer, GuardedProtocol, bound
from rollart.app.serving.server import Server, _engine_settings
from rollart.app.serving.settings import ServeSettings
from rollart.types.errors import RequestError
from rollart.types.messages import Abort, Add


class Impatient(GuardedProtocol):
    stall_s = 0.05


def run(test, *, leaves=True):
    """Run a test beside a server with a scripted engine; it gets `connect`, and the script.

    With `leaves`, the server is asked to end after it; otherwise it has to end by itself.
    """
    script = Script()

    async def whole():
        serving = engine(script)
        await serving.start()
        with bound("127.0.0.1", 0) as there:
            there.listen()  # so that connections may come before the server does
            there.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # so that little fits on the way
            port = there.getsockname()[1]
            config = uvicorn.Config(
                application(served(), serving, KEY), http=Impatient, ws="none", lifespan="off", log_config=None
            )
            server = Server(config, serving, 1.0)
            task = asyncio.create_task(server.serve([there]))
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await test(lambda: asyncio.open_connection("127.0.0.1", port), script)
            finally:
                if leaves:
                    server.leave()
                async with asyncio.timeout(PATIENCE_S):
                    await task
                await serving.close()

    asyncio.run(whole())


def chat(fields='"max_tokens": 8'):
    body = '{"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], %s}' % fields  # noqa: UP031 - braces
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()


@pytest.mark.parametrize("sent", [b"", b"POST /v1/chat/completions HTTP/1.1\r\nHost:"], ids=["nothing", "half"])
def test_headers_that_do_not_come(sent):
    async def test(connect, script):
        reader, writer = await connect()
        writer.write(sent)
        assert await reader.read() == b"", "closed"
        writer.close()
        assert not script.commands

    run(test)


def test_a_client_that_waits_for_its_answer_is_left_alone():
    async def test(connect, script):
        reader, writer = await connect()
        writer.write(chat())
        (add,) = await script.sent(Add)
        idle, other = await connect()
        assert await idle.read() == b"", "closed: the server has looked at both connections more than once"
        other.close()
        script.done(add.request, "here it is")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        assert b"here it is" in await reader.readuntil(b"here it is")
        writer.close()

    run(test)


def test_an_answer_that_is_not_read_is_aborted():
    async def test(connect, script):
        reader, writer = await connect()
        writer.write(chat('"stream": true'))
        (add,) = await script.sent(Add)
        writer.transport.pause_reading()
        feeding = asyncio.create_task(feed(script, add.request))
        assert (await script.sent(Abort))[0].request == add.request
        feeding.cancel()
        writer.close()
        del reader

    async def feed(script, request):
        """More than all buffers between server and client take."""
        while True:
            script.progress(request, "x" * 10_000)
            await asyncio.sleep(0.01)

    run(test)


def test_a_lost_engine_ends_the_server():
    async def test(connect, script):
        reader, writer = await connect()
        writer.write(chat())
        await script.sent(Add)
        script.die(OSError("the device is gone"))
        assert (await reader.readline()).startswith(b"HTTP/1.1 503")
        assert await reader.read(), "the rest of the answer, and then the end: the server closes its connections"
        writer.close()

    run(test, leaves=False)


def test_a_server_says_that_it_is_ready_when_it_listens(monkeypatch):
    said = []
    with bound("127.0.0.1", 0) as socket_of_server:
        server = GracefulServer(uvicorn.Config(None, lifespan="off", log_config=None))
        server.ready = "ready"

        def say(line):
            socket.create_connection(socket_of_server.getsockname()).close()
            said.append(line)
            server.leave()

        monkeypatch.setattr(listening, "say", say)
        asyncio.run(server.serve([socket_of_server]))
    assert said == ["ready"]


def test_a_context_beyond_that_of_the_model_is_noted(capsys):
    positions = served().shape.positions
    for context in (positions, positions + 1):
        assert _engine_settings(served(), ServeSettings(max_context=context))["max_context"] == context
    assert capsys.readouterr().err.count(f"was trained for {positions} positions") == 1


def test_a_port_that_was_taken_while_a_model_was_loaded():
    """Two sockets may share a port until one listens."""
    with bound("127.0.0.1", 0) as first, bound(*first.getsockname()) as second:
        first.listen()
        server = GracefulServer(uvicorn.Config(None, lifespan="off", log_config=None))
        with pytest.raises(RequestError, match="choose another with --port"):
            asyncio.run(server.serve([second]))


def test_a_port_in_use_and_a_host_that_is_none():
    with bound("127.0.0.1", 0) as first:
        first.listen()
        with pytest.raises(RequestError, match="choose another with --port"), bound(*first.getsockname()):
            pass
    for host in ("no such host", "a..b"):
        with pytest.raises(RequestError, match="--host"), bound(host, 0):
            pass
