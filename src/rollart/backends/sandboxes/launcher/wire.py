"""Messages between worker, launcher and supervisors: JSON with file descriptors, over Unix sockets."""

import json
import os
import select
import socket
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

MAX_MESSAGE_BYTES = 160 * 1024
MAX_DESCRIPTORS = 4


class Cut(OSError):
    """A message arrived without its end, or without its file descriptors because there is no room for them."""


def pair() -> tuple[socket.socket, socket.socket]:
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MAX_MESSAGE_BYTES)
    return ends


def fits(message: Mapping[str, Any]) -> bool:
    return len(json.dumps(message)) <= MAX_MESSAGE_BYTES


def send(end: socket.socket, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
    socket.send_fds(end, [json.dumps(message).encode()], list(descriptors))


def receive(end: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next message; None if the other side is gone."""
    try:
        data, descriptors, flags, _ = socket.recv_fds(end, MAX_MESSAGE_BYTES + 1, MAX_DESCRIPTORS)
    except ConnectionResetError:
        return None
    if not data:
        return None
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        close(*descriptors)
        raise Cut("a message was cut: it is too long, or too many files are open")
    message = json.loads(data)
    assert isinstance(message, dict)
    return message, list(descriptors)


def wait(descriptors: Iterable[int], seconds: float | None = None) -> set[int]:
    """Those that can be read, or whose other side is gone; `select` knows only the first 1,024 of a process."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {found for found, _ in poll.poll(None if seconds is None else max(0.0, seconds) * 1000)}


def close(*descriptors: int) -> None:
    for descriptor in descriptors:
        with suppress(OSError):
            os.close(descriptor)
