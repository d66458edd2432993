"""One end of a link, as a process of its own, for `test_link_cut.py`: it runs in a network namespace.

    python link_end.py controller HOST ['{"VANISHED_S": 2, ...}']
    python link_end.py worker HOST ['{...}']      first line of its input: what the controller printed

Both send numbered blobs until their input says `finish`, then `LAST`, and print one JSON object per line: the address
and credentials (controller), `streaming` once blobs come in, and a report once the other's `LAST` is here or the link
is closed. On `pause` they stop sending. They keep the link open until their input ends.
"""

import asyncio
import json
import sys
import threading
import time

from rollart.distributed import link
from rollart.distributed.handshake import Credentials
from rollart.distributed.link import Connection, Peer, PeerServer

LAST = b"last"
PAUSE_S = 0.005
ENOUGH = 50
"""Number of blobs received after which the stream is under way."""


def say(**what):
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


class Received:
    """Blobs of the other end: whether each came once and in order, and the longest time between two."""

    def __init__(self):
        self.count, self.in_order, self.gap_s = 0, True, 0.0
        self.ended = threading.Event()
        self._last_at = time.monotonic()

    def take(self, blob):
        if blob == LAST:
            self.ended.set()
            return
        self.in_order &= blob == numbered(self.count)
        self.count += 1
        now = time.monotonic()
        self.gap_s = max(self.gap_s, now - self._last_at)
        self._last_at = now
        if self.count == ENOUGH:
            say(streaming=True)

    def report(self, sent, closed):
        say(sent=sent, received=self.count, in_order=self.in_order, gap_s=self.gap_s, closed=closed)


def numbered(index):
    return index.to_bytes(8, "little") * 20


class Orders:
    """What the test has written to standard input."""

    def __init__(self):
        self.finish, self.pause, self.over = (threading.Event() for _ in range(3))
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in sys.stdin:
            {"finish": self.finish, "pause": self.pause}[line.strip()].set()
        self.over.set()


async def controller(host):
    server, received = PeerServer(host), Received()
    peer = Peer(received.take)
    server.expect(peer)
    say(address=server.address, id=peer.credentials.id.hex(), secret=peer.credentials.secret.hex())
    orders, sent = Orders(), 0
    await until(lambda: peer.connected)
    while not (orders.finish.is_set() or orders.pause.is_set() or peer.closed.done()):
        peer.send(numbered(sent))
        sent += 1
        await asyncio.sleep(PAUSE_S)
    if orders.finish.is_set():
        peer.send(LAST)
    elif orders.pause.is_set():
        say(paused=True)
    await until(lambda: received.ended.is_set() or peer.closed.done())
    received.report(sent, peer.closed.done())
    await asyncio.to_thread(orders.over.wait)
    server.forget(peer)
    await server.close()


async def until(condition):
    while not condition():  # noqa: ASYNC110 - the condition sends no notification
        await asyncio.sleep(PAUSE_S)


def worker(_host):
    told = json.loads(sys.stdin.readline())
    credentials = Credentials(bytes.fromhex(told["id"]), bytes.fromhex(told["secret"]))
    connection, received = Connection(tuple(told["address"]), credentials), Received()
    closed = threading.Event()

    def receive():
        for blob in connection.receive():
            received.take(blob)
        closed.set()
        received.ended.set()

    threading.Thread(target=receive, daemon=True).start()
    orders, sent = Orders(), 0
    while not (orders.finish.is_set() or orders.pause.is_set() or closed.is_set()):
        connection.send(numbered(sent))
        sent += 1
        time.sleep(PAUSE_S)
    if orders.finish.is_set():
        connection.send(LAST)
    elif orders.pause.is_set():
        say(paused=True)
    received.ended.wait()
    received.report(sent, closed.is_set())
    orders.over.wait()


if __name__ == "__main__":
    role, host, *changed = sys.argv[1:]
    for name, value in json.loads(changed[0] if changed else "{}").items():
        setattr(link, name, value)
    if role == "controller":
        asyncio.run(controller(host))
    else:
        worker(host)
