"""A WebSocket client (RFC 6455) on the standard library: text messages, one at a time, for one thread.

Invariant: an error of the connection is an `OSError`; after one it is of no use.
"""

from __future__ import annotations

import base64
import hashlib
import os
import socket
import ssl
from contextlib import suppress
from urllib.parse import SplitResult

_ACCEPT = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_TEXT, _CLOSE, _PING, _PONG = 1, 8, 9, 10
_FINAL = 0x80
LARGEST_BYTES = 1 << 26
"""Limit of a message."""


class WebSocket:
    """An open connection."""

    def __init__(self, url: SplitResult, timeout_s: float) -> None:
        """`url` has the scheme `ws` or `wss`."""
        secure = url.scheme == "wss"
        host, port = url.hostname or "", url.port or (443 if secure else 80)
        self._socket = socket.create_connection((host, port), timeout_s)
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if secure:
                self._socket = ssl.create_default_context().wrap_socket(self._socket, server_hostname=host)
            self._received = self._socket.makefile("rb")
            self._shake_hands(url, host, port)
        except BaseException:
            self._socket.close()
            raise

    def send(self, text: str) -> None:
        self._send(_TEXT, text.encode())

    def receive(self) -> str:
        """The next message."""
        message = b""
        while True:
            first, second = self._read(2)
            length = second & 0x7F
            if length >= 126:
                length = int.from_bytes(self._read(2 if length == 126 else 8), "big")
            if len(message) + length > LARGEST_BYTES:
                raise ConnectionError(f"a message of more than {LARGEST_BYTES:,} bytes")
            payload = self._read(length)
            kind = first & 0x0F
            if kind == _CLOSE:
                reason = payload[2:].decode(errors="replace")
                raise ConnectionError(f"the server closed the connection{f': {reason}' if reason else ''}")
            if kind == _PING:
                self._send(_PONG, payload)
            elif kind != _PONG:
                message += payload
                if first & _FINAL:
                    return message.decode(errors="replace")

    def close(self) -> None:
        try:
            self._send(_CLOSE, (1000).to_bytes(2, "big"))
        except OSError:  # the other side was first
            pass
        finally:
            self._received.close()
            self._socket.close()

    def abort(self) -> None:
        """End a call that another thread waits in."""
        with suppress(OSError):  # it has ended
            self._socket.shutdown(socket.SHUT_RDWR)

    def _shake_hands(self, url: SplitResult, host: str, port: int) -> None:
        key = base64.b64encode(os.urandom(16))
        target = (url.path or "/") + (f"?{url.query}" if url.query else "")
        lines = (
            f"GET {target} HTTP/1.1",
            f"Host: {host}:{port}",
            "Upgrade: websocket",
            "Connection: Upgrade",
            f"Sec-WebSocket-Key: {key.decode()}",
            "Sec-WebSocket-Version: 13",
        )
        self._socket.sendall("\r\n".join((*lines, "", "")).encode())
        status = self._received.readline().decode(errors="replace").strip()
        headers = {}
        while line := self._received.readline().strip():
            name, _, value = line.partition(b":")
            headers[name.strip().lower()] = value.strip()
        if " 101 " not in f"{status} ":
            raise ConnectionError(f"the server does not speak WebSocket at {target}: {status or 'it closed'}")
        expected = base64.b64encode(hashlib.sha1(key + _ACCEPT).digest())
        if headers.get(b"sec-websocket-accept") != expected:
            raise ConnectionError("the server's handshake is wrong")

    def _send(self, kind: int, payload: bytes) -> None:
        length = len(payload)
        if length < 126:
            head = bytes((_FINAL | kind, 0x80 | length))
        elif length < 1 << 16:
            head = bytes((_FINAL | kind, 0x80 | 126)) + length.to_bytes(2, "big")
        else:
            head = bytes((_FINAL | kind, 0x80 | 127)) + length.to_bytes(8, "big")
        mask = os.urandom(4)
        repeated = (mask * (length // 4 + 1))[:length]
        masked = (int.from_bytes(payload, "big") ^ int.from_bytes(repeated, "big")).to_bytes(length, "big")
        self._socket.sendall(head + mask + masked)

    def _read(self, length: int) -> bytes:
        data = self._received.read(length)
        if len(data) < length:
            raise ConnectionError("the server closed the connection")
        return data
