"""What is kept of a command's output: the first and the last half of a limit."""

from collections import deque

CHUNK_BYTES = 2**16


class Output:
    """One stream.

    >>> output = Output(8)
    >>> for chunk in (b"abcd", b"efgh", b"ijkl"):
    ...     _ = output.add(chunk)
    >>> output.bytes(), output.dropped
    (b'abcd\\n[4 bytes dropped]\\nijkl', 4)
    """

    def __init__(self, limit: int) -> None:
        self._head_room, self._tail_room = limit // 2, limit - limit // 2
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0
        self._to_stream = limit
        self.dropped = 0

    def add(self, chunk: bytes) -> bytes:
        """Add what was read; returns the part that is within the limit, counted from the beginning."""
        part = chunk[: self._head_room - len(self._head)]
        self._head += part
        rest = chunk[len(part) :]
        if rest:
            self._tail.append(rest)
            self._tail_bytes += len(rest)
            while self._tail_bytes - len(self._tail[0]) >= self._tail_room:
                self._drop(len(self._tail[0]))
                self._tail.popleft()
        streamed = chunk[: self._to_stream]
        self._to_stream -= len(streamed)
        return streamed

    def _drop(self, count: int) -> None:
        self._tail_bytes -= count
        self.dropped += count

    def bytes(self) -> bytes:
        """Call once, at the end."""
        over = self._tail_bytes - self._tail_room
        tail = b"".join(self._tail)
        if over > 0:
            self._drop(over)
            tail = tail[over:]
        marker = f"\n[{self.dropped} bytes dropped]\n".encode() if self.dropped else b""
        return bytes(self._head) + marker + tail
