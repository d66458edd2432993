"""Transport of bytes between the controller and worker processes, one connection each.

    worker's process                                     controller's loop
    Connection ── secret, then frames ─────────────────► PeerServer ──► Peer: on_message, closed
               ◄────────────────────────────── frames ── Peer.send

A frame is the length of a blob, followed by the blob. Invariants: blobs arrive complete, in order and once, or the
connection is over; nothing is received after `closed`; connections without a worker's secret are ignored.
"""

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from typing import cast

logger = logging.getLogger(__name__)

SECRET_BYTES = 32
LENGTH_BYTES = 8
READ_BYTES = 2**18
IDENTIFY_TIMEOUT_S = 30.0
"""Time that a new connection has to identify itself."""

Address = tuple[str, int]


def frame(blob: bytes) -> bytes:
    return len(blob).to_bytes(LENGTH_BYTES, "little") + blob


class Frames:
    """Splits a byte stream into blobs.

    >>> frames, (sent, more) = Frames(), (frame(b"one") + frame(b"") + frame(b"two")[:-1], b"o")
    >>> list(frames.feed(sent)), list(frames.feed(more))
    ([b'one', b''], [b'two'])
    """

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Add received bytes; returns the blobs that are complete now."""
        held = self._bytes
        held += data
        blobs = []
        start = 0
        while (body := start + LENGTH_BYTES) <= len(held):
            end = body + int.from_bytes(held[start:body], "little")
            if end > len(held):
                break
            blobs.append(bytes(held[body:end]))
            start = end
        del held[:start]
        return blobs


# --- in the worker's process ----------------------------------------------------------------------------------------


class Connection:
    """The worker's end of a connection. One thread may send while another receives."""

    def __init__(self, address: Address, secret: bytes) -> None:
        self._socket = socket.create_connection(address, timeout=IDENTIFY_TIMEOUT_S)
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A forked copy of this process must not keep the connection open when the process itself is gone.
        os.register_at_fork(after_in_child=self._socket.close)
        self._socket.sendall(secret)

    def send(self, blob: bytes) -> None:
        """Send a blob. Returns once it is handed to the kernel; raises `OSError` if the controller is gone."""
        self._socket.sendall(frame(blob))

    def receive(self) -> Iterator[bytes]:
        """Yield the controller's blobs until it is gone."""
        frames = Frames()
        while data := self._read():
            yield from frames.feed(data)

    def _read(self) -> bytes:
        try:
            return self._socket.recv(READ_BYTES)
        except ConnectionError:
            return b""


# --- in the controller ----------------------------------------------------------------------------------------------


class Peer:
    """The controller's view of a worker that is expected to connect."""

    def __init__(self, on_message: Callable[[bytes], None]) -> None:
        self.on_message = on_message
        self.secret = secrets.token_bytes(SECRET_BYTES)
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the connection is closed and everything received through it was handled."""
        self._transport: asyncio.Transport | None = None
        self._unsent: list[bytes] = []
        """Blobs to send once it connects."""

    @property
    def connected(self) -> bool:
        """Whether it has ever connected."""
        return self._transport is not None

    def send(self, blob: bytes) -> None:
        """Send a blob. Once the connection is closed it is lost, like everything in flight to a worker that dies."""
        if self._transport is None:
            self._unsent.append(frame(blob))
        else:
            self._transport.write(frame(blob))

    def attach(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        transport.writelines(self._unsent)
        self._unsent.clear()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class PeerServer:
    """Server that workers connect to. Use from one event loop."""

    def __init__(self, host: str) -> None:
        """Listens at once: the kernel holds connections that arrive before the loop accepts them."""
        listening = socket.create_server((host, 0), backlog=1024)
        self.address: Address = listening.getsockname()[:2]
        self._expected: dict[bytes, Peer] = {}
        loop = asyncio.get_running_loop()
        self._opening = loop.create_task(loop.create_server(lambda: _ServerProtocol(self._expected), sock=listening))

    def expect(self, peer: Peer) -> None:
        self._expected[peer.secret] = peer

    def forget(self, peer: Peer) -> None:
        """Stop listening to the worker."""
        self._expected.pop(peer.secret, None)
        peer.close()

    async def close(self) -> None:
        (await self._opening).close()


class _ServerProtocol(asyncio.Protocol):
    """The controller's end of one connection."""

    def __init__(self, expected: dict[bytes, Peer]) -> None:
        self._expected = expected
        self._peer: Peer | None = None
        self._received = b""
        self._frames = Frames()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._limit = asyncio.get_running_loop().call_later(IDENTIFY_TIMEOUT_S, self._transport.abort)

    def data_received(self, data: bytes) -> None:
        if self._peer is None:
            self._received += data
            if len(self._received) < SECRET_BYTES or self._transport.is_closing():
                return
            self._peer, data = self._identify(), self._received[SECRET_BYTES:]
        if self._peer is not None:
            for blob in self._frames.feed(data):
                self._peer.on_message(blob)

    def _identify(self) -> Peer | None:
        self._limit.cancel()
        peer = self._expected.pop(self._received[:SECRET_BYTES], None)  # a secret is valid once
        if peer is None:
            logger.warning("ignored a connection that is not from a worker of this run")
            self._transport.abort()
        else:
            peer.attach(self._transport)
        return peer

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002 - however it was lost
        self._limit.cancel()
        if self._peer is not None and not self._peer.closed.done():
            self._peer.closed.set_result(None)
