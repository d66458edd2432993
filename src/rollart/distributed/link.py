"""Transport of bytes between the controller and worker processes, one TCP connection each.

    worker's process                                     controller's loop
    Connection ◄───────── handshake, then frames ──────► PeerServer ──► Peer: on_message, closed
               ◄────────────────────────────── frames ── Peer.send

A frame is the length of a blob, followed by the blob. Invariants: blobs arrive complete, in order and once, or the
connection is over; nothing is received after `closed`; credentials are good for one connection, and a failed attempt
does not use them up.

Protection. Before the first frame both sides prove that they know the worker's secret, which is not sent (`handshake`).
Until then a connection costs the controller a few KB, has `IDENTIFY_TIMEOUT_S`, and is one of at most
`MAX_UNAUTHENTICATED`; further ones wait in the kernel. The server binds to one interface. Nothing is unpickled: blobs
are decoded by `wire`.

Not protected. Frames are neither encrypted nor authenticated one by one: an attacker on the cluster's network can read
them, and one who can alter packets can relay the handshake and then take over the connection. The network is trusted
that far. (A keyed BLAKE2b would take about 1 µs per small frame at each end, and 0.7 ms per MB.) The secret reaches the
worker in its order, by Ray, and is as confidential as Ray's traffic.

Cuts. A cut is left to TCP, which retransmits for `VANISHED_S`: the frames of a cut of 5 s, or 15 s, arrive late but
all. A link ends, at both ends, once the other machine has not answered for that long, even if it is idle. Links within
one machine have no such limit.

Frozen processes. Their kernel answers for them, so a worker also sends an empty frame every `PULSE_S`, from a thread of
its own; `Peer.silent` reports when none has arrived for too long.
"""

import asyncio
import errno
import ipaddress
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import cast

from rollart.distributed.handshake import (
    CHALLENGE_BYTES,
    HELLO_BYTES,
    PROOF_BYTES,
    ControllerHandshake,
    Credentials,
    WorkerHandshake,
)
from rollart.types.errors import LinkError, RequestError

logger = logging.getLogger(__name__)

LENGTH_BYTES = 8
READ_BYTES = 2**18
MAX_FRAME_BYTES = 2**32
"""Bound on what a corrupt length can make a receiver hold.

The largest message is a batch for the trainer, at 8 bytes per token: 512 trajectories of 65,536 tokens are 0.27 GB.
"""

IDENTIFY_TIMEOUT_S = 30.0
"""Time that a new connection has to authenticate itself."""
JOIN_TIMEOUT_S = 60.0
"""Time that a worker has to connect and authenticate: longer, so that it outlasts a queue of silent strangers."""
CONNECT_RETRY_S = 0.2
MAX_UNAUTHENTICATED = 128
"""Number of connections that may be authenticating at the same time."""
BACKLOG = 1024
ACCEPT_RETRY_S = 1.0
"""Pause after a failure to accept, such as too many open files; what asyncio's own server waits."""

KEEPALIVE_IDLE_S = 10
KEEPALIVE_INTERVAL_S = 5
KEEPALIVE_PROBES = 4
"""An idle link is probed, since the end of a machine that loses power or network sends nothing."""
VANISHED_S = KEEPALIVE_IDLE_S + KEEPALIVE_INTERVAL_S * KEEPALIVE_PROBES
"""Time without an answer after which the other machine is gone; the kernel's default with unsent data is 15 minutes.

Retransmissions back off to 6 s and then 13 s apart, so that 30 s leave room for one after a cut of 25 s. The kernel
also applies it to a process that has not read for this long while more is sent to it than its buffers hold.
"""
UNREACHABLE = (errno.EHOSTUNREACH, errno.ENETUNREACH)
PULSE_S = 5.0
FROZEN_S = 25.0
"""How long a worker on this machine may be silent; one on another machine may be cut off for `VANISHED_S` besides."""
PULSE = b""

Address = tuple[str, int]


def frame(blob: bytes) -> bytes:
    """Frame a blob; raises `LinkError` if no receiver would take it."""
    if len(blob) > MAX_FRAME_BYTES:
        raise LinkError(_too_large(len(blob)))
    return len(blob).to_bytes(LENGTH_BYTES, "little") + blob


def _too_large(length: int) -> str:
    return f"a message of {length:,} bytes is larger than the limit of a link, {MAX_FRAME_BYTES:,}"


def tune(link: socket.socket) -> None:
    """Set the options of a connected socket, at either end."""
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if link.getsockname()[0] == link.getpeername()[0]:
        return  # one machine: its kernel closes both ends, and a process that is stopped by hand may be resumed
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, VANISHED_S * 1000)


class Frames:
    """Splits a byte stream into blobs.

    >>> frames, (sent, more) = Frames(), (frame(b"one") + frame(b"") + frame(b"two")[:-1], b"o")
    >>> list(frames.feed(sent)), list(frames.feed(more))
    ([b'one', b''], [b'two'])
    """

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Add received bytes; returns the blobs that are complete now. Raises `LinkError` if one is too large."""
        held = self._bytes
        held += data
        blobs = []
        start = 0
        while (body := start + LENGTH_BYTES) <= len(held):
            length = int.from_bytes(held[start:body], "little")
            if length > MAX_FRAME_BYTES:
                raise LinkError(_too_large(length))
            end = body + length
            if end > len(held):
                break
            blobs.append(bytes(held[body:end]))
            start = end
        del held[:start]
        return blobs


# --- in the worker's process ----------------------------------------------------------------------------------------


class Connection:
    """The worker's end of a connection. One thread may send while another receives."""

    def __init__(self, address: Address, credentials: Credentials) -> None:
        """Connect and authenticate; raises `LinkError` if this does not lead to the controller."""
        deadline = time.monotonic() + JOIN_TIMEOUT_S
        try:
            with ExitStack() as on_failure:
                self._socket = on_failure.enter_context(_connect(address, deadline))
                tune(self._socket)
                self._authenticate(WorkerHandshake(credentials), deadline)
                on_failure.pop_all()
        except (OSError, LinkError) as error:
            host, port = address
            raise LinkError(f"no link to the controller at {host}:{port}: {error}") from error
        self._socket.settimeout(None)
        # A forked copy of this process must not keep the connection open when the process itself is gone.
        os.register_at_fork(after_in_child=self._socket.close)

    def _authenticate(self, handshake: WorkerHandshake, deadline: float) -> None:
        self._socket.sendall(handshake.hello)
        self._socket.sendall(handshake.answer(self._read_exactly(CHALLENGE_BYTES, deadline)))
        handshake.check_welcome(self._read_exactly(PROOF_BYTES, deadline))

    def _read_exactly(self, count: int, deadline: float) -> bytes:
        """Read a message of the handshake, and nothing of what follows it."""
        received = b""
        while len(received) < count:
            self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
            data = self._socket.recv(count - len(received))
            if not data:
                raise LinkError("it closed the connection before it was authenticated")
            received += data
        return received

    def send(self, blob: bytes) -> None:
        """Send a blob. Returns once it is handed to the kernel; raises `OSError` if the controller is gone."""
        self._socket.sendall(frame(blob))

    def receive(self) -> Iterator[bytes]:
        """Yield the controller's blobs until it is gone. Raises `LinkError` if one is too large."""
        frames = Frames()
        while data := self._read():
            yield from frames.feed(data)

    def _read(self) -> bytes:
        try:
            return self._socket.recv(READ_BYTES)
        except OSError:  # reset, or the machine has vanished: timed out, host unreachable
            return b""


def _connect(address: Address, deadline: float) -> socket.socket:
    while True:
        left_s = deadline - time.monotonic()
        try:
            return socket.create_connection(address, timeout=max(left_s, 0.001))
        except OSError as error:
            # TCP outlasts a cut only once it is connected.
            if error.errno not in UNREACHABLE or left_s < CONNECT_RETRY_S:
                raise
        time.sleep(CONNECT_RETRY_S)


# --- in the controller ----------------------------------------------------------------------------------------------


class Peer:
    """The controller's view of a worker that is expected to connect."""

    def __init__(self, on_message: Callable[[bytes], None]) -> None:
        self.on_message = on_message
        self.credentials = Credentials.new()
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the connection is closed and everything received through it was handled."""
        self._transport: asyncio.Transport | None = None
        self._heard = False
        self._silent_s = 0.0
        self._may_be_silent_s = FROZEN_S
        self._unsent: list[bytes] = []
        """Blobs to send once it connects."""

    @property
    def connected(self) -> bool:
        """Whether it has ever connected and was authenticated."""
        return self._transport is not None

    def send(self, blob: bytes) -> None:
        """Send a blob. Once the connection is closed it is lost, like everything in flight to a worker that dies.

        Raises `LinkError` if it is too large.
        """
        if self._transport is None:
            self._unsent.append(frame(blob))
        elif not self._transport.is_closing():
            self._transport.write(frame(blob))

    def heard(self) -> None:
        """Something was received."""
        self._heard = True

    def silent(self, passed_s: float) -> bool:
        """Whether the worker has sent nothing for too long, `passed_s` after the last call.

        Time is counted in calls and not by a clock: when this process itself was stopped, no worker was silent.
        """
        if self._transport is None or self._heard:
            self._heard, self._silent_s = False, 0.0
        else:
            self._silent_s += passed_s
        return self._silent_s > self._may_be_silent_s

    def attach(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        own, other = transport.get_extra_info("sockname"), transport.get_extra_info("peername")
        if own is None or other is None or own[0] != other[0]:
            self._may_be_silent_s = FROZEN_S + VANISHED_S
        transport.writelines(self._unsent)
        self._unsent.clear()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class PeerServer:
    """Server that workers connect to. Use from one event loop."""

    def __init__(self, host: str) -> None:
        """Listens at once: the kernel holds connections that arrive before the loop accepts them.

        `host` is the address of one interface.
        """
        self._listening = socket.create_server((host, 0), backlog=BACKLOG)
        self.address: Address = self._listening.getsockname()[:2]
        if ipaddress.ip_address(self.address[0]).is_unspecified:
            self._listening.close()
            raise RequestError(f"{host!r} means every interface of this machine; name the one of the cluster")
        self._listening.setblocking(False)
        self._expected: dict[bytes, Peer] = {}
        self._unauthenticated: set[_ServerProtocol] = set()
        self._slots = asyncio.Semaphore(MAX_UNAUTHENTICATED)
        self._accepting = asyncio.get_running_loop().create_task(self._accept(), name="accept links")

    def expect(self, peer: Peer) -> None:
        self._expected[peer.credentials.id] = peer

    def forget(self, peer: Peer) -> None:
        """Stop listening to the worker."""
        self._expected.pop(peer.credentials.id, None)
        peer.close()

    async def close(self) -> None:
        """Accept no more connections; those of workers stay."""
        self._accepting.cancel()
        await asyncio.wait([self._accepting])
        self._listening.close()
        for protocol in self._unauthenticated:
            protocol.abort()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._slots.acquire()
            try:
                accepted, _ = await loop.sock_accept(self._listening)
            except OSError as error:
                logger.warning("a connection could not be accepted: %s", error)
                self._slots.release()
                await asyncio.sleep(ACCEPT_RETRY_S)
                continue
            await self._take(accepted)

    async def _take(self, accepted: socket.socket) -> None:
        protocol = _ServerProtocol(self._expected, self._settled)
        self._unauthenticated.add(protocol)
        try:
            tune(accepted)
            await asyncio.get_running_loop().connect_accepted_socket(lambda: protocol, accepted)
        except OSError:  # it is gone already
            accepted.close()
            self._settled(protocol)

    def _settled(self, protocol: "_ServerProtocol") -> None:
        """A connection is authenticated, or over before it was."""
        self._unauthenticated.discard(protocol)
        self._slots.release()


class _ServerProtocol(asyncio.Protocol):
    """The controller's end of one connection."""

    def __init__(self, expected: dict[bytes, Peer], on_settled: Callable[["_ServerProtocol"], None]) -> None:
        self._expected = expected
        self._on_settled = on_settled
        self._handshake: ControllerHandshake | None = None
        self._received = b""
        self._peer: Peer | None = None
        self._frames = Frames()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._limit = asyncio.get_running_loop().call_later(
            IDENTIFY_TIMEOUT_S, self._refuse, f"it was not authenticated within {IDENTIFY_TIMEOUT_S:g} s"
        )

    def data_received(self, data: bytes) -> None:
        if self._peer is None:
            self._authenticate(data)
            return
        try:
            blobs = self._frames.feed(data)
        except LinkError as error:
            logger.warning("closed the link to the worker at %s: %s", self._source(), error)
            self._transport.abort()
            return
        self._peer.heard()
        for blob in blobs:
            if blob != PULSE:
                self._peer.on_message(blob)

    def _authenticate(self, data: bytes) -> None:
        """Take the next part of the handshake. Its sender waits for an answer after each message."""
        wanted = HELLO_BYTES if self._handshake is None else PROOF_BYTES
        if len(self._received) + len(data) > wanted:
            self._refuse("it sent more than a handshake")
            return
        self._received += data
        if len(self._received) < wanted:
            return
        message, self._received = self._received, b""
        if self._handshake is None:
            self._handshake = ControllerHandshake(message, self._secret_of)
            self._transport.write(self._handshake.challenge)
            return
        try:
            welcome = self._handshake.welcome(message)
        except LinkError as error:
            self._refuse(str(error))
            return
        peer = self._expected.pop(self._handshake.id, None)
        if peer is None:
            self._refuse("its credentials were used by another connection, or withdrawn")
            return
        self._settle()
        self._transport.write(welcome)
        peer.attach(self._transport)
        self._peer = peer

    def _secret_of(self, peer_id: bytes) -> bytes | None:
        peer = self._expected.get(peer_id)
        return None if peer is None else peer.credentials.secret

    def _refuse(self, reason: str) -> None:
        logger.warning("refused a connection from %s that is not from a worker of this run: %s", self._source(), reason)
        self._transport.abort()

    def _source(self) -> str:
        """Address that it comes from, for logs."""
        name = self._transport.get_extra_info("peername")
        return f"{name[0]}:{name[1]}" if name else "an unknown address"

    def _settle(self) -> None:
        self._limit.cancel()
        self._on_settled(self)

    def abort(self) -> None:
        self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002 - however it was lost
        if self._peer is None:
            self._settle()
        elif not self._peer.closed.done():
            self._peer.closed.set_result(None)
