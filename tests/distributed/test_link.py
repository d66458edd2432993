"""Connections between the controller and workers: complete blobs in order, bounded in size.

Who is let in is in `test_link_strangers.py`; cuts of the network are in `test_link_cut.py`.
"""

import asyncio
import socket
import threading

import pytest
from links import HOST, connected, expected, on_loop, until

from rollart.distributed import link
from rollart.distributed.handshake import Credentials
from rollart.distributed.link import FROZEN_S, LENGTH_BYTES, PULSE, Connection, Frames, PeerServer, frame, tune
from rollart.types.errors import LinkError, RequestError

BLOBS = [b"", b"one", bytes(range(256)) * 5000, b"last"]


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
        connection = await asyncio.to_thread(Connection, server.address, peer.credentials)
        await until(lambda: peer.connected)
        for blob in BLOBS[1:]:
            peer.send(blob)
        blobs = connection.receive()
        assert [await asyncio.to_thread(next, blobs) for _ in BLOBS] == BLOBS
        for blob in BLOBS:
            await asyncio.to_thread(connection.send, blob)
        await until(lambda: len(received) == len(BLOBS) - 1)
        assert received == BLOBS[1:]  # an empty one is a pulse
        peer.close()
        assert await asyncio.to_thread(lambda: list(blobs)) == []
        with pytest.raises(OSError):  # noqa: PT011 - reset or broken pipe
            await asyncio.to_thread(send_after_close, connection)

    on_loop(test)


def test_a_worker_is_silent_if_nothing_comes_for_too_long_not_even_a_pulse():
    async def test(server):
        peer, received = expected(server)
        assert not peer.silent(1000 * FROZEN_S)  # it has not connected yet
        connection = await asyncio.to_thread(Connection, server.address, peer.credentials)
        await until(lambda: peer.connected)
        for blob in (PULSE, b"message"):
            assert not peer.silent(FROZEN_S)
            assert peer.silent(1.0)
            await asyncio.to_thread(connection.send, blob)
            await until(lambda: not peer.silent(0.0))
        assert received == [b"message"]

    on_loop(test)


def test_over_comes_after_the_last_blob():
    async def test(server):
        peer, received = expected(server)
        peer.closed.add_done_callback(lambda _: received.append("closed"))

        def send_all():
            connection = Connection(server.address, peer.credentials)
            for blob in BLOBS:
                connection.send(blob)
            connection._socket.close()

        thread = threading.Thread(target=send_all)
        thread.start()
        await peer.closed
        await until(lambda: received[-1] == "closed")
        assert received == [*BLOBS[1:], "closed"]
        thread.join()

    on_loop(test)


def test_half_a_blob_is_not_delivered():
    async def test(server):
        peer, received, connection = await connected(server)
        connection._socket.sendall(frame(b"whole") + frame(b"half")[:-1])
        connection._socket.close()
        await peer.closed
        assert received == [b"whole"]

    on_loop(test)


def test_a_length_beyond_the_limit_is_refused_before_its_bytes_come(monkeypatch):
    monkeypatch.setattr(link, "MAX_FRAME_BYTES", 1000)
    assert Frames().feed(frame(bytes(1000))) == [bytes(1000)]
    with pytest.raises(LinkError, match=r"1,001 bytes is larger than the limit of a link, 1,000"):
        Frames().feed((1001).to_bytes(LENGTH_BYTES, "little"))
    with pytest.raises(LinkError, match="larger than the limit"):
        frame(bytes(1001))


def test_a_length_that_no_message_has_is_beyond_the_limit():
    with pytest.raises(LinkError, match="larger than the limit"):
        Frames().feed(b"\xff" * LENGTH_BYTES)


def test_a_worker_that_announces_too_much_is_cut_off(caplog):
    async def test(server):
        peer, received, connection = await connected(server)
        connection._socket.sendall(frame(b"good"))
        await until(lambda: received)
        connection._socket.sendall((2**62).to_bytes(LENGTH_BYTES, "little"))
        await peer.closed
        assert await asyncio.to_thread(lambda: list(connection.receive())) == []
        assert received == [b"good"]
        assert "closed the link to the worker at 127.0.0.1:" in caplog.text
        assert "larger than the limit" in caplog.text

    on_loop(test)


def test_a_controller_that_announces_too_much_is_an_error_of_the_worker():
    async def test(server):
        peer, _, connection = await connected(server)
        peer._transport.write((2**62).to_bytes(LENGTH_BYTES, "little"))
        with pytest.raises(LinkError, match="larger than the limit"):
            await asyncio.to_thread(lambda: list(connection.receive()))

    on_loop(test)


def test_what_is_too_large_is_not_sent(monkeypatch):
    async def test(server):
        peer, received, connection = await connected(server)
        unborn, _ = expected(server)
        monkeypatch.setattr(link, "MAX_FRAME_BYTES", 1000)
        for send in (peer.send, unborn.send, connection.send):
            with pytest.raises(LinkError, match="larger than the limit"):
                send(bytes(1001))
        connection.send(b"still here")
        await until(lambda: received)
        assert received == [b"still here"]

    on_loop(test)


def test_who_is_forgotten_is_cut_off():
    async def test(server):
        peer, _, connection = await connected(server)
        server.forget(peer)
        assert await asyncio.to_thread(lambda: list(connection.receive())) == []
        await peer.closed

    on_loop(test)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "0"])
def test_the_server_does_not_bind_to_every_interface(host):
    async def main():
        with pytest.raises(RequestError, match="means every interface"):
            PeerServer(host)

    asyncio.run(main())


def test_the_server_binds_to_its_interface_only():
    async def test(server):
        assert server.address[0] == HOST
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", server.address[1]))

    on_loop(test)


def options(each):
    """Keep-alive on, and the kernel's seconds or counts of the rest."""
    tcp = (socket.TCP_NODELAY, socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
    return [
        bool(each.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)),
        *(each.getsockopt(socket.IPPROTO_TCP, option) for option in tcp),
    ]


def test_both_ends_between_machines_notice_that_the_other_has_vanished():
    with socket.create_server((HOST, 0)) as listening:
        far = socket.create_connection(listening.getsockname(), source_address=("127.0.0.2", 0))
        near, _ = listening.accept()
        with far, near:
            for end in (far, near):
                tune(end)
                assert options(end) == [True, 1, 10, 5, 4, 30_000]


def test_a_link_within_a_machine_has_no_such_limit():
    async def test(server):
        peer, _, connection = await connected(server)
        for end in (connection._socket, peer._transport.get_extra_info("socket")):
            assert options(end)[:2] == [False, 1]
            assert options(end)[-1] == 0

    on_loop(test)


def test_an_unreachable_controller_is_tried_again(monkeypatch):
    monkeypatch.setattr(link, "CONNECT_RETRY_S", 0.0)
    real, failures = socket.create_connection, [OSError(number, "cut") for number in link.UNREACHABLE]

    def create_connection(*arguments, **options):
        if failures:
            raise failures.pop()
        return real(*arguments, **options)

    monkeypatch.setattr(socket, "create_connection", create_connection)

    async def test(server):
        await connected(server)
        assert failures == []

    on_loop(test)


def test_a_controller_that_is_gone_is_not_waited_for():
    with socket.create_server((HOST, 0)) as closing:
        address = closing.getsockname()
    with pytest.raises(LinkError, match=rf"no link to the controller at {HOST}:{address[1]}: .*refused"):
        Connection(address, Credentials.new())
