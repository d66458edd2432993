"""Connections between the controller and workers: complete blobs in order; strangers are rejected."""

import asyncio
import socket
import threading
from contextlib import suppress

import pytest

from rollart.distributed import link
from rollart.distributed.link import Connection, Frames, Peer, PeerServer, frame

HOST = "127.0.0.1"
BLOBS = [b"", b"one", bytes(range(256)) * 5000, b"last"]


def on_loop(test):
    async def main():
        server = PeerServer(HOST)
        try:
            async with asyncio.timeout(100):
                await test(server)
        finally:
            await server.close()

    asyncio.run(main())


def expected(server):
    received = []
    peer = Peer(received.append)
    server.expect(peer)
    return peer, received


async def connected(server):
    peer, received = expected(server)
    connection = await asyncio.to_thread(Connection, server.address, peer.secret)
    await until(lambda: peer.connected)
    return peer, received, connection


async def until(condition):
    while not condition():  # noqa: ASYNC110 - the condition sends no notification
        await asyncio.sleep(0.005)


def read_to_the_end(connection):
    """Read until the other side closes or resets the connection."""
    with connection, suppress(ConnectionError):
        while connection.recv(1000):
            pass


def send_after_close(connection):
    for _ in range(100):
        connection.send(BLOBS[2])


@pytest.mark.parametrize("size", [1, 7, 8, 9, 1000, 10**7])
def test_blobs_are_whole_however_the_bytes_come(size):
    frames, stream = Frames(), b"".join(map(frame, BLOBS))
    assert [blob for at in range(0, len(stream), size) for blob in frames.feed(stream[at : at + size])] == BLOBS


def test_both_send_and_receive():
    async def test(server):
        peer, received = expected(server)
        peer.send(BLOBS[0])  # before it has connected
        connection = await asyncio.to_thread(Connection, server.address, peer.secret)
        await until(lambda: peer.connected)
        for blob in BLOBS[1:]:
            peer.send(blob)
        blobs = connection.receive()
        assert [await asyncio.to_thread(next, blobs) for _ in BLOBS] == BLOBS
        for blob in BLOBS:
            await asyncio.to_thread(connection.send, blob)
        await until(lambda: len(received) == len(BLOBS))
        assert received == BLOBS
        peer.close()
        assert await asyncio.to_thread(lambda: list(blobs)) == []
        with pytest.raises(OSError):  # noqa: PT011 - reset or broken pipe
            await asyncio.to_thread(send_after_close, connection)

    on_loop(test)


def test_over_comes_after_the_last_blob():
    async def test(server):
        peer, received = expected(server)
        peer.closed.add_done_callback(lambda _: received.append("closed"))

        def send_all():
            connection = Connection(server.address, peer.secret)
            for blob in BLOBS:
                connection.send(blob)
            connection._socket.close()

        thread = threading.Thread(target=send_all)
        thread.start()
        await peer.closed
        await until(lambda: received[-1] == "closed")
        assert received == [*BLOBS, "closed"]
        thread.join()

    on_loop(test)


def test_half_a_blob_is_not_delivered():
    async def test(server):
        peer, received = expected(server)
        with socket.create_connection(server.address) as half:
            half.sendall(peer.secret + frame(b"whole") + frame(b"half")[:-1])
        await peer.closed
        assert received == [b"whole"]

    on_loop(test)


@pytest.mark.parametrize("secret", [b"x" * 32, b"y" * 5000])
def test_a_stranger_is_not_listened_to(secret, caplog):
    async def test(server):
        _, received = expected(server)
        stranger = socket.create_connection(server.address)
        stranger.sendall(secret + frame(b"hello"))
        await asyncio.to_thread(read_to_the_end, stranger)
        assert received == []
        assert "not from a worker of this run" in caplog.text

    on_loop(test)


def test_a_secret_is_good_for_one_call():
    async def test(server):
        peer, received, first = await connected(server)
        second = await asyncio.to_thread(Connection, server.address, peer.secret)
        assert await asyncio.to_thread(lambda: list(second.receive())) == []
        first.send(b"still here")
        await until(lambda: received)
        assert received == [b"still here"]

    on_loop(test)


def test_who_does_not_say_who_it_is_is_cut_off(monkeypatch):
    monkeypatch.setattr(link, "IDENTIFY_TIMEOUT_S", 0.05)

    async def test(server):
        silent = socket.create_connection(server.address)
        silent.sendall(b"half a secret")
        await asyncio.to_thread(read_to_the_end, silent)

    on_loop(test)


def test_who_is_forgotten_is_cut_off():
    async def test(server):
        peer, _, connection = await connected(server)
        server.forget(peer)
        assert await asyncio.to_thread(lambda: list(connection.receive())) == []
        await peer.closed

    on_loop(test)
