"""What the tests of links share: a server on a loop, workers that connect to it, a relay that records."""

import asyncio
import socket
import threading
from contextlib import contextmanager, suppress

from rollart.distributed.link import Connection, Peer, PeerServer

HOST = "127.0.0.1"


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


async def connect(server, credentials):
    return await asyncio.to_thread(Connection, server.address, credentials)


async def connected(server):
    peer, received = expected(server)
    connection = await connect(server, peer.credentials)
    await until(lambda: peer.connected)
    return peer, received, connection


async def until(condition):
    while not condition():  # noqa: ASYNC110 - the condition sends no notification
        await asyncio.sleep(0.005)


def read_to_the_end(connection):
    """Read until the other side closes or resets the connection."""
    data = b""
    with connection, suppress(ConnectionError):
        while more := connection.recv(1000):
            data += more
    return data


def read_exactly(connection, count):
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        assert more, "closed too early"
        data += more
    return data


class Relay:
    """Forwards connections to a server, one at a time, and records the bytes in both directions."""

    def __init__(self, target):
        self._target = target
        self._listening = socket.create_server((HOST, 0))
        self.address = self._listening.getsockname()
        self.to_server, self.to_worker = bytearray(), bytearray()
        self._thread = threading.Thread(target=self._forward)
        self._thread.start()

    def _forward(self):
        worker, _ = self._listening.accept()
        with worker, socket.create_connection(self._target) as server:
            back = threading.Thread(target=self._copy, args=(server, worker, self.to_worker))
            back.start()
            self._copy(worker, server, self.to_server)
            back.join()

    @staticmethod
    def _copy(source, sink, record):
        with suppress(OSError):
            while data := source.recv(65536):
                record += data
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def close(self):
        """Wait until the connection is over."""
        self._thread.join()
        self._listening.close()


@contextmanager
def fake_controller(behave):
    """A server that has no secret; `behave(connection)` runs in a thread for the one connection that it takes."""
    with socket.create_server((HOST, 0)) as listening:

        def serve():
            connection, _ = listening.accept()
            with connection, suppress(ConnectionError):
                behave(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        yield listening.getsockname()
        thread.join()
