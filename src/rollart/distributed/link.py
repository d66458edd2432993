"""Transport of bytes between the controller and worker processes, one connection each.

    worker's process                                   controller's loop
    Line ── secret, then frames ─────────────────────► Exchange ──► Caller: heard, over
         ◄────────────────────────────────── frames ── Caller.say

A frame is the length of a blob, followed by the blob. Invariants: blobs arrive complete, in order and once, or the
connection is over; nothing is received after `over`; connections without a worker's secret are ignored.
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
INTRODUCTION_S = 30.0
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


class Line:
    """The worker's end of a connection. One thread may send while another receives."""

    def __init__(self, address: Address, secret: bytes) -> None:
        self._socket = socket.create_connection(address, timeout=INTRODUCTION_S)
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A forked copy of this process must not keep the connection open when the process itself is gone.
        os.register_at_fork(after_in_child=self._socket.close)
        self._socket.sendall(secret)

    def say(self, blob: bytes) -> None:
        """Send a blob. Returns once it is handed to the kernel; raises `OSError` if the controller is gone."""
        self._socket.sendall(frame(blob))

    def listen(self) -> Iterator[bytes]:
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


class Caller:
    """The controller's view of a worker that is expected to connect."""

    def __init__(self, heard: Callable[[bytes], None]) -> None:
        self.heard = heard
        self.secret = secrets.token_bytes(SECRET_BYTES)
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the connection is over and everything received through it was handled."""
        self._transport: asyncio.Transport | None = None
        self._unsaid: list[bytes] = []
        """Blobs to send once it connects."""

    @property
    def there(self) -> bool:
        """Whether it has ever connected."""
        return self._transport is not None

    def say(self, blob: bytes) -> None:
        """Send a blob. After the end it is lost, like everything in flight to a worker that dies."""
        if self._transport is None:
            self._unsaid.append(frame(blob))
        else:
            self._transport.write(frame(blob))

    def called(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        transport.writelines(self._unsaid)
        self._unsaid.clear()

    def hang_up(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class Exchange:
    """Server that workers connect to. Use from one event loop."""

    def __init__(self, host: str) -> None:
        """Listens at once: the kernel holds connections that arrive before the loop accepts them."""
        listening = socket.create_server((host, 0), backlog=1024)
        self.address: Address = listening.getsockname()[:2]
        self._expected: dict[bytes, Caller] = {}
        loop = asyncio.get_running_loop()
        self._opening = loop.create_task(loop.create_server(lambda: _Reception(self._expected), sock=listening))

    def expect(self, caller: Caller) -> None:
        self._expected[caller.secret] = caller

    def forget(self, caller: Caller) -> None:
        """Stop listening to the worker."""
        self._expected.pop(caller.secret, None)
        caller.hang_up()

    async def close(self) -> None:
        (await self._opening).close()


class _Reception(asyncio.Protocol):
    """The controller's end of one connection."""

    def __init__(self, expected: dict[bytes, Caller]) -> None:
        self._expected = expected
        self._caller: Caller | None = None
        self._name = b""
        self._frames = Frames()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._limit = asyncio.get_running_loop().call_later(INTRODUCTION_S, self._transport.abort)

    def data_received(self, data: bytes) -> None:
        if self._caller is None:
            self._name += data
            if len(self._name) < SECRET_BYTES or self._transport.is_closing():
                return
            self._caller, data = self._introduced(), self._name[SECRET_BYTES:]
        if self._caller is not None:
            for blob in self._frames.feed(data):
                self._caller.heard(blob)

    def _introduced(self) -> Caller | None:
        self._limit.cancel()
        caller = self._expected.pop(self._name[:SECRET_BYTES], None)  # a secret is valid once
        if caller is None:
            logger.warning("ignored a connection that is not from a worker of this run")
            self._transport.abort()
        else:
            caller.called(self._transport)
        return caller

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002 - however it was lost
        self._limit.cancel()
        if self._caller is not None and not self._caller.over.done():
            self._caller.over.set_result(None)
