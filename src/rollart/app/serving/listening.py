"""What servers of this project share: socket, secret, signals, and guards against connections that hang."""

import asyncio
import os
import secrets
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from rollart.types.errors import RequestError

STALL_S = 30.0


def secret_of(variable: str) -> str:
    """The secret in an environment variable, or a new one, which is shown once."""
    secret = os.environ.get(variable, "")
    if not secret:
        secret = secrets.token_urlsafe(32)
        say(f"{variable} is not set; the key of this server, until it stops, is {secret}")
    if not secret.isascii() or not secret.isprintable() or " " in secret:
        raise RequestError(f"{variable} has characters that a header cannot carry; use letters, digits and punctuation")
    return secret


@contextmanager
def bound(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that does not listen yet, so that a port in use is noticed before a model is loaded.

    Linux lets others bind the port until one of them listens.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family)
    except (OSError, UnicodeError) as error:
        raise RequestError(f"--host {host}: {error}; give an address of this machine") from error
    with bound:
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except OSError as error:
            raise _taken(host, port, error) from error
        yield bound


def _taken(host: str, port: int, error: OSError) -> RequestError:
    return RequestError(f"cannot listen on {host} port {port}: {error}; choose another with --port or --host")


def url_of(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM acts like Ctrl-C until the server listens, so that temporary files are removed."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def say(text: str) -> None:
    sys.stderr.write(f"rollart: {text}\n")
    sys.stderr.flush()


class GracefulServer(uvicorn.Server):
    """Finishes what is in flight at the first SIGTERM or SIGINT, within uvicorn's grace period; ends at the second."""

    ready = ""
    """Line to print once it listens."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except OSError as error:
            if not sockets:
                raise
            host, port = sockets[0].getsockname()[:2]
            raise _taken(host, port, error) from error
        if self.started and self.ready:
            say(self.ready)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.leave)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def leave(self) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True


class GuardedProtocol(H11Protocol):
    """Closes a connection that makes no progress for a while: headers that do not come, an answer that is not read.

    Bodies have a deadline of their own (`http`).
    """

    stall_s = STALL_S

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._seen: object = None
        self._look_again()

    def connection_lost(self, exc: Exception | None) -> None:
        self._watch.cancel()
        super().connection_lost(exc)

    def _look_again(self) -> None:
        self._watch = self.loop.call_later(self.stall_s, self._look)

    def _look(self) -> None:
        waits_for = self._waits_for()
        if waits_for is not None and waits_for == self._seen:
            self.transport.abort()
            return
        self._seen = waits_for
        self._look_again()

    def _waits_for(self) -> object:
        """What the client has to do next: the same object or number as long as it does not; None if it is our turn."""
        unread = self.transport.get_write_buffer_size()
        if unread:
            return unread
        if self.cycle is None or self.cycle.response_complete:
            return (self.cycle,)
        return None
