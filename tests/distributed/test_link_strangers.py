"""Who is let in: workers of this run, once each; who is not believed: a server without the worker's secret."""

import asyncio
import re
import socket

import pytest
from links import (
    Relay,
    connect,
    connected,
    expected,
    fake_controller,
    on_loop,
    read_exactly,
    read_to_the_end,
    until,
)

from rollart.distributed import link
from rollart.distributed.handshake import (
    CHALLENGE_BYTES,
    HELLO_BYTES,
    PROOF_BYTES,
    Credentials,
    WorkerHandshake,
)
from rollart.distributed.link import Connection, Peer, frame
from rollart.types.errors import LinkError

NOT_BELIEVED = "it could not prove that it is the controller of this worker"


async def still_joins(server, peer, received):
    """The real worker, after whatever others have tried."""
    assert not peer.connected
    connection = await connect(server, peer.credentials)
    connection.send(b"real")
    await until(lambda: received)
    assert received == [b"real"]


def attempt(address, hello, answer):
    """Run the handshake with this hello; `answer(challenge)` makes the rest. Returns what the server sent."""
    with socket.create_connection(address) as stranger:
        stranger.sendall(hello)
        challenge = read_exactly(stranger, CHALLENGE_BYTES)
        stranger.sendall(answer(challenge))
        return challenge, read_to_the_end(stranger)


@pytest.mark.parametrize(
    "sent", [b"GET / HTTP/1.1\r\n\r\n".ljust(HELLO_BYTES + 1), bytes(5000), bytes(HELLO_BYTES) + frame(b"hello")]
)
def test_a_stranger_is_not_listened_to(sent, caplog):
    async def test(server):
        peer, received = expected(server)
        stranger = socket.create_connection(server.address)
        stranger.sendall(sent)
        await asyncio.to_thread(read_to_the_end, stranger)
        assert "not from a worker of this run: it sent more than a handshake" in caplog.text
        await still_joins(server, peer, received)

    on_loop(test)


def test_a_wrong_proof_and_an_unknown_id_are_refused_alike(caplog):
    async def test(server):
        peer, received = expected(server)
        for peer_id in (peer.credentials.id, Credentials.new().id):
            hello = WorkerHandshake(Credentials(peer_id, Credentials.new().secret)).hello
            _, rest = await asyncio.to_thread(attempt, server.address, hello, lambda _: bytes(PROOF_BYTES))
            assert rest == b""
        refusals = [re.sub(r":\d+", "", record.getMessage()) for record in caplog.records]
        assert len(refusals) == 2
        assert refusals[0] == refusals[1]
        assert "it could not prove that it is a worker of this run" in refusals[0]
        await still_joins(server, peer, received)

    on_loop(test)


def test_frames_that_come_before_the_welcome_are_refused():
    async def test(server):
        peer, received = expected(server)
        worker = WorkerHandshake(peer.credentials)
        await asyncio.to_thread(
            attempt, server.address, worker.hello, lambda challenge: worker.answer(challenge) + frame(b"early")
        )
        await still_joins(server, peer, received)

    on_loop(test)


@pytest.mark.parametrize("wrong", ["secret", "id"])
def test_a_worker_with_wrong_credentials_fails_with_a_message(wrong):
    async def test(server):
        peer, received = expected(server)
        good, bad = peer.credentials, Credentials.new()
        tried = Credentials(good.id, bad.secret) if wrong == "secret" else Credentials(bad.id, good.secret)
        with pytest.raises(LinkError, match=rf"no link to the controller at [\d.:]+: {NOT_BELIEVED}"):
            await connect(server, tried)
        await still_joins(server, peer, received)

    on_loop(test)


def test_the_secret_is_not_on_the_wire_and_a_recording_opens_nothing():
    async def test(server):
        peer, received = expected(server)
        relay = Relay(server.address)
        connection = await asyncio.to_thread(Connection, relay.address, peer.credentials)
        connection.send(b"real")
        await until(lambda: received)
        peer.send(b"order")
        assert await asyncio.to_thread(next, connection.receive()) == b"order"
        connection._socket.close()
        await peer.closed
        await asyncio.to_thread(relay.close)

        to_server, to_worker = bytes(relay.to_server), bytes(relay.to_worker)
        hello, answer, frames = (
            to_server[:HELLO_BYTES],
            to_server[HELLO_BYTES : HELLO_BYTES + PROOF_BYTES],
            to_server[HELLO_BYTES + PROOF_BYTES :],
        )
        assert hello.startswith(peer.credentials.id)
        assert frames == frame(b"real")
        assert to_worker[CHALLENGE_BYTES + PROOF_BYTES :] == frame(b"order")
        for stream in (to_server, to_worker):
            for part in (peer.credentials.secret[:8], peer.credentials.secret[-8:]):
                assert part not in stream
                assert part.hex().encode() not in stream

        received.clear()
        again = Peer(received.append)
        again.credentials = peer.credentials  # as if they were valid once more: the nonces alone have to do
        server.expect(again)
        challenge, rest = await asyncio.to_thread(attempt, server.address, hello, lambda _: answer)
        assert challenge != to_worker[:CHALLENGE_BYTES]
        assert rest == b""

        def replay(worker):
            read_exactly(worker, HELLO_BYTES)
            worker.sendall(to_worker)
            read_to_the_end(worker)

        with fake_controller(replay) as address, pytest.raises(LinkError, match=NOT_BELIEVED):
            await asyncio.to_thread(Connection, address, peer.credentials)
        await still_joins(server, again, received)

    on_loop(test)


def test_credentials_are_good_for_one_connection(caplog):
    async def test(server):
        peer, received, first = await connected(server)
        with pytest.raises(LinkError, match=NOT_BELIEVED):
            await connect(server, peer.credentials)
        first.send(b"still here")
        await until(lambda: received)
        assert received == [b"still here"]

    on_loop(test)
    assert len(caplog.records) == 0  # the second gave up by itself: it was not believed either


def test_of_two_that_are_challenged_at_the_same_time_one_is_let_in(caplog):
    async def test(server):
        peer, received = expected(server)
        slow = WorkerHandshake(peer.credentials)
        with socket.create_connection(server.address) as second:
            second.sendall(slow.hello)
            challenge = await asyncio.to_thread(read_exactly, second, CHALLENGE_BYTES)
            first = await connect(server, peer.credentials)
            second.sendall(slow.answer(challenge))
            assert await asyncio.to_thread(read_to_the_end, second) == b""
        assert "used by another connection" in caplog.text
        first.send(b"still here")
        await until(lambda: received)
        assert received == [b"still here"]

    on_loop(test)


def test_a_worker_that_is_forgotten_while_it_connects_is_refused(caplog):
    async def test(server):
        peer, _ = expected(server)
        worker = WorkerHandshake(peer.credentials)
        with socket.create_connection(server.address) as late:
            late.sendall(worker.hello)
            challenge = await asyncio.to_thread(read_exactly, late, CHALLENGE_BYTES)
            server.forget(peer)
            late.sendall(worker.answer(challenge))
            assert await asyncio.to_thread(read_to_the_end, late) == b""
        assert "withdrawn" in caplog.text
        assert not peer.connected

    on_loop(test)


@pytest.mark.parametrize("part", [0, 1, HELLO_BYTES])
def test_a_connection_that_does_not_authenticate_is_cut_off(part, monkeypatch, caplog):
    monkeypatch.setattr(link, "IDENTIFY_TIMEOUT_S", 0.05)

    async def test(server):
        peer, received = expected(server)
        silent = socket.create_connection(server.address)
        silent.sendall(WorkerHandshake(peer.credentials).hello[:part])
        sent = await asyncio.to_thread(read_to_the_end, silent)
        assert len(sent) in ((0, CHALLENGE_BYTES) if part == HELLO_BYTES else (0,))  # 0 on a busy machine
        assert "it was not authenticated within 0.05 s" in caplog.text
        assert server._unauthenticated == set()
        monkeypatch.setattr(link, "IDENTIFY_TIMEOUT_S", 30.0)
        await still_joins(server, peer, received)

    on_loop(test)


def test_an_authenticated_link_has_no_deadline(monkeypatch):
    monkeypatch.setattr(link, "IDENTIFY_TIMEOUT_S", 60.0)

    async def test(server):
        timers = []
        loop = asyncio.get_running_loop()
        real = loop.call_later

        def call_later(delay, *arguments, **options):
            timer = real(delay, *arguments, **options)
            if delay == link.IDENTIFY_TIMEOUT_S:
                timers.append(timer)
            return timer

        monkeypatch.setattr(loop, "call_later", call_later)
        await connected(server)
        assert [timer.cancelled() for timer in timers] == [True]

    on_loop(test)


def test_strangers_beyond_the_limit_wait_in_the_kernel(monkeypatch):
    monkeypatch.setattr(link, "MAX_UNAUTHENTICATED", 2)

    async def test(server):
        peer, received = expected(server)
        silent = [socket.create_connection(server.address) for _ in range(5)]
        await until(lambda: len(server._unauthenticated) == 2)
        worker = asyncio.create_task(connect(server, peer.credentials))
        for _ in range(50):  # passes of the loop, any of which might accept a third
            await asyncio.sleep(0)
            assert len(server._unauthenticated) <= 2
        assert not peer.connected
        for each in silent:
            each.close()
        (await worker).send(b"real")
        await until(lambda: received)
        assert len(server._unauthenticated) == 0

    on_loop(test)


def test_authenticated_links_do_not_count(monkeypatch):
    monkeypatch.setattr(link, "MAX_UNAUTHENTICATED", 1)

    async def test(server):
        held = [await connected(server) for _ in range(3)]
        assert all(peer.connected for peer, _, _ in held)

    on_loop(test)


def test_a_failure_to_accept_is_not_the_end_of_the_server(monkeypatch, caplog):
    monkeypatch.setattr(link, "ACCEPT_RETRY_S", 0.0)

    async def test(server):
        loop = asyncio.get_running_loop()
        real, failures = loop.sock_accept, [OSError(24, "Too many open files")] * 200

        async def sock_accept(listening):
            if failures:
                raise failures.pop()
            return await real(listening)

        monkeypatch.setattr(loop, "sock_accept", sock_accept)
        await connected(server)
        assert failures == []
        assert "could not be accepted: [Errno 24] Too many open files" in caplog.text

    on_loop(test)


def test_a_server_that_closes_drops_strangers_and_keeps_workers():
    async def test(server):
        peer, received, connection = await connected(server)
        stranger = socket.create_connection(server.address)
        await until(lambda: server._unauthenticated)
        await server.close()
        assert await asyncio.to_thread(read_to_the_end, stranger) == b""
        connection.send(b"still here")
        await until(lambda: received)
        assert not peer.closed.done()

    on_loop(test)


# --- a worker that is sent to the wrong server


def echo(worker):
    hello = read_exactly(worker, HELLO_BYTES)
    worker.sendall(hello.ljust(CHALLENGE_BYTES, b"\0"))
    read_to_the_end(worker)


def forge(worker):
    read_exactly(worker, HELLO_BYTES)
    worker.sendall(bytes(1000))
    read_to_the_end(worker)


def hang_up(worker):
    read_exactly(worker, HELLO_BYTES)


@pytest.mark.parametrize(
    ("behave", "why"),
    [
        (echo, NOT_BELIEVED),
        (forge, NOT_BELIEVED),
        (hang_up, "it closed the connection before it was authenticated"),
    ],
)
def test_a_fake_controller_is_refused(behave, why):
    with (
        fake_controller(behave) as (host, port),
        pytest.raises(LinkError, match=rf"^no link to the controller at {host}:{port}: {why}$"),
    ):
        Connection((host, port), Credentials.new())


def test_a_server_that_relays_the_handshake_but_not_the_welcome_is_refused():
    async def test(server):
        peer, _ = expected(server)

        def behave(worker):
            with socket.create_connection(server.address) as real:
                real.sendall(read_exactly(worker, HELLO_BYTES))
                worker.sendall(read_exactly(real, CHALLENGE_BYTES))
                read_exactly(worker, PROOF_BYTES)
                worker.sendall(bytes(PROOF_BYTES))
                read_to_the_end(worker)

        with fake_controller(behave) as address, pytest.raises(LinkError, match=NOT_BELIEVED):
            await asyncio.to_thread(Connection, address, peer.credentials)

    on_loop(test)


def test_a_controller_that_does_not_answer_is_given_up(monkeypatch):
    monkeypatch.setattr(link, "JOIN_TIMEOUT_S", 0.2)
    with fake_controller(read_to_the_end) as address, pytest.raises(LinkError, match="timed out"):
        Connection(address, Credentials.new())
