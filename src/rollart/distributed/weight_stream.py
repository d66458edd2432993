"""Streams of buckets between nodes, one TCP connection per request.

    reader                                              holder
    handshake ────────────────────────────────────────► knows the secret of the run
    Wanted: version, buckets ─────────────────────────► for each bucket, as soon as it is there:
                             ◄───────────────────────── HERE, its bytes; or FAILED and a reason, and the end
    Given: version, bucket, its bytes ────────────────► writes it to its place
                             ◄───────────────────────── HERE or FAILED

Bytes go from the shared memory of one node to that of the other without a further copy in these processes; digests are
computed piece by piece, while a piece is in the processor's cache. On two cores one stream carries about 3 GB/s this
way, and chunks through Ray's object store 1.4 GB/s: that is a copy at each end and gRPC between them.

Invariants: nothing is read from a connection that has not proven that it knows the secret, and the secret is not sent
(`handshake`); a bucket whose bytes do not match its digest raises `DigestMismatch` at the receiver; every wait ends,
after `SILENT_S` without a byte or `STALL_S` without a bucket.
"""

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Protocol

import msgspec

from rollart.distributed.handshake import (
    CHALLENGE_BYTES,
    HELLO_BYTES,
    PROOF_BYTES,
    ControllerHandshake,
    Credentials,
    WorkerHandshake,
)
from rollart.distributed.link import VANISHED_S, Address, tune
from rollart.ports.weight_rules import PIECE_BYTES
from rollart.types.errors import LinkError, WeightError
from rollart.types.versions import Version
from rollart.types.weights import Manifest, verify_chunks

logger = logging.getLogger(__name__)

SILENT_S = VANISHED_S
STALL_S = 60.0
"""Timeout for a bucket that is still being published."""
MAX_UNAUTHENTICATED = 64
MAX_MESSAGE_BYTES = 2**20
LENGTH_BYTES = 4
HERE, FAILED = b"\x01", b"\x00"


class Wanted(msgspec.Struct, frozen=True, tag=True):
    """Request for buckets, in this order."""

    version: Version
    indices: tuple[int, ...]


class Given(msgspec.Struct, frozen=True, tag=True):
    """Announces a bucket of a version that is being published; its bytes follow."""

    version: Version
    index: int


class Holding(Protocol):
    """What a holder offers to its server. Both raise `WeightError`."""

    def reading(self, version: Version, index: int) -> AbstractContextManager[memoryview]:
        """A bucket, as soon as it is there. The receiver verifies it."""
        ...

    def writing(self, version: Version, index: int) -> AbstractContextManager[tuple[Manifest, memoryview]]:
        """The place of a bucket of a version that is being published; it counts as filled after the block."""
        ...


class StreamServer:
    """Serves the buckets of one holder, each connection in a thread of its own."""

    def __init__(self, host: str, credentials: Credentials, holding: Holding) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._server = socket.create_server((host, 0), family=family, backlog=MAX_UNAUTHENTICATED)
        self.address: Address = (host, self._server.getsockname()[1])
        self._credentials = credentials
        self._holding = holding
        self._strangers = threading.BoundedSemaphore(MAX_UNAUTHENTICATED)
        threading.Thread(target=self._accept, name="weight streams", daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        self._server.close()

    def _accept(self) -> None:
        while True:
            self._strangers.acquire()
            try:
                link, _ = self._server.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._serve, args=(link,), name="weight stream", daemon=True).start()

    def _serve(self, link: socket.socket) -> None:
        with link, suppress(OSError, LinkError):  # the other end notices, and tries again
            try:
                link.settimeout(SILENT_S)
                tune(link)
                self._authenticate(link)
            finally:
                self._strangers.release()
            try:
                self._answer(link)
            except (WeightError, msgspec.MsgspecError) as error:
                link.sendall(FAILED)
                _send_message(link, str(error).encode())

    def _authenticate(self, link: socket.socket) -> None:
        secrets = {self._credentials.id: self._credentials.secret}
        handshake = ControllerHandshake(_receive(link, HELLO_BYTES), secrets.get)
        link.sendall(handshake.challenge)
        link.sendall(handshake.welcome(_receive(link, PROOF_BYTES)))

    def _answer(self, link: socket.socket) -> None:
        request = msgspec.msgpack.decode(_receive_message(link), type=Wanted | Given)
        if isinstance(request, Given):
            with self._holding.writing(request.version, request.index) as (manifest, place):
                verify_chunks(manifest, request.index, _received(link, place))
            link.sendall(HERE)
            return
        for index in request.indices:
            with self._holding.reading(request.version, index) as data:
                link.sendall(HERE)
                _send(link, data)


def fetch(
    address: Address,
    credentials: Credentials,
    manifest: Manifest,
    missing: list[int],
    place: Callable[[int], memoryview],
) -> None:
    """Fetch buckets to their places, removing each from `missing` when it is there.

    Raises `LinkError` or `WeightError` when the rest has to come from elsewhere.
    """
    with _request(address, credentials, Wanted(manifest.version, tuple(missing))) as link:
        while missing:
            _check_status(link, address)
            verify_chunks(manifest, missing[0], _received(link, place(missing[0])))
            missing.pop(0)


def give(address: Address, credentials: Credentials, manifest: Manifest, index: int, data: bytes | memoryview) -> None:
    """Send a bucket of a version that is being published to its place on another node."""
    with _request(address, credentials, Given(manifest.version, index)) as link:
        _send(link, data)
        _check_status(link, address)


@contextmanager
def _request(address: Address, credentials: Credentials, request: Wanted | Given) -> Iterator[socket.socket]:
    """An authenticated connection on which a request was sent; failures of the network are `LinkError`."""
    try:
        with socket.create_connection(address, timeout=SILENT_S) as link:
            tune(link)
            handshake = WorkerHandshake(credentials)
            link.sendall(handshake.hello)
            link.sendall(handshake.answer(_receive(link, CHALLENGE_BYTES)))
            handshake.check_welcome(_receive(link, PROOF_BYTES))
            _send_message(link, msgspec.msgpack.encode(request))
            yield link
    except OSError as error:
        raise LinkError(f"weights cannot be exchanged with {address[0]}:{address[1]}: {error}") from error


def _check_status(link: socket.socket, address: Address) -> None:
    link.settimeout(STALL_S + SILENT_S)
    status = _receive(link, len(HERE))
    link.settimeout(SILENT_S)
    if status != HERE:
        raise WeightError(f"the holder at {address[0]}: {_receive_message(link).decode(errors='replace')}")


def _send(link: socket.socket, data: bytes | memoryview) -> None:
    view = memoryview(data).cast("B")
    for start in range(0, len(view), PIECE_BYTES):
        link.sendall(view[start : start + PIECE_BYTES])


def _received(link: socket.socket, place: memoryview) -> Iterator[memoryview]:
    """Receive bytes to their place; yields piece after piece."""
    for start in range(0, len(place), PIECE_BYTES):
        piece = place[start : start + PIECE_BYTES]
        _fill(link, piece)
        yield piece


def _fill(link: socket.socket, place: memoryview) -> None:
    while len(place):
        count = link.recv_into(place)
        if not count:
            raise LinkError("the other end closed a weight stream")
        place = place[count:]


def _receive(link: socket.socket, length: int) -> bytes:
    data = bytearray(length)
    _fill(link, memoryview(data))
    return bytes(data)


def _send_message(link: socket.socket, data: bytes) -> None:
    link.sendall(len(data).to_bytes(LENGTH_BYTES, "little") + data)


def _receive_message(link: socket.socket) -> bytes:
    length = int.from_bytes(_receive(link, LENGTH_BYTES), "little")
    if length > MAX_MESSAGE_BYTES:
        raise LinkError(f"a message of {length:,} bytes on a weight stream is too large")
    return _receive(link, length)
