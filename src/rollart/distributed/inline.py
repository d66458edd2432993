"""The inline runtime: every worker is a thread of this process.

        controller's loop                                   thread of one worker
    post ──► outgoing ──(end of this pass of the loop)──► mailbox ──► Worker.post, Worker.advance
    Listener ◄── inbox, drained on the loop ◄──(call_soon_threadsafe)── joined, events, died

Invariants: a worker is built, driven and closed by one thread (`driving`). The listener is called only on the loop, in
the order of events, and never after `stop` or after the worker's death. Nothing here waits for user code without a
limit: a thread that does not end is abandoned and named in the log.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollart.distributed.driving import Drive
from rollart.ports.factory import load
from rollart.ports.runtime import Listener
from rollart.types.errors import InvariantBroken, RequestError
from rollart.types.ids import WorkerId
from rollart.types.messages import Role, WorkerCommand, WorkerEvent, WorkerInfo
from rollart.types.placement import NOTHING, Needs

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0


class InlineRuntime:
    """Hosts workers in threads of this process. Use from one event loop."""

    def __init__(self, *, close_timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        self._close_timeout_s = close_timeout_s
        self._listener: Listener | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._hosts: dict[WorkerId, _Host] = {}
        self._ending: list[_Host] = []
        """Stopped hosts whose threads may still run."""
        self._names: set[WorkerId] = set()
        self._outgoing: dict[WorkerId, list[WorkerCommand]] = {}
        self._inbox: deque[tuple[_Host, Callable[[Listener], None], bool]] = deque()
        self._inbox_lock = threading.Lock()
        self._drain_due = False
        self._closed = False

    def listen(self, listener: Listener) -> None:
        if self._listener is not None:
            raise InvariantBroken("this runtime already has a listener; `listen` is called once")
        self._listener = listener

    def spawn(
        self,
        worker: WorkerId,
        role: Role,
        factory: str,
        settings: Mapping[str, Any],
        *,
        python: str = "",
        needs: Needs = NOTHING,  # noqa: ARG002 - nothing is reserved
    ) -> None:
        if python:
            raise RequestError(f"worker {worker} cannot run with {python}: it is a thread of this process; use Ray")
        if self._listener is None:
            raise InvariantBroken("call `listen` before the first `spawn`: the worker would have no listener")
        if self._closed:
            raise RequestError("this runtime is closed; make a new one to start workers")
        if worker in self._names:
            raise InvariantBroken(f"worker id {worker!r} was used before; every incarnation needs its own id")
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        host = _Host(worker, role, factory, dict(settings), self._loop.time, self._deliver)
        self._names.add(worker)
        self._hosts[worker] = host
        host.thread.start()

    def post(self, worker: WorkerId, commands: Sequence[WorkerCommand]) -> None:
        if worker not in self._hosts or not commands:
            return
        assert self._loop is not None  # a host exists, so `spawn` has set it
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        self._outgoing.setdefault(worker, []).extend(commands)

    def stop(self, worker: WorkerId) -> None:
        host = self._hosts.pop(worker, None)
        if host is None:
            return
        self._outgoing.pop(worker, None)
        host.silent = True
        host.drive.end()
        self._ending = [other for other in self._ending if other.thread.is_alive()]
        self._ending.append(host)

    async def close(self) -> None:
        self._closed = True
        for worker in list(self._hosts):
            self.stop(worker)
        ending, self._ending = self._ending, []
        if not ending:
            return
        await asyncio.to_thread(_join, ending, self._close_timeout_s)
        for host in ending:
            if host.thread.is_alive():
                logger.warning(
                    "worker %s did not end within %g s and is abandoned; it may hang in %s",
                    host.worker,
                    self._close_timeout_s,
                    host.factory,
                )

    def _flush(self) -> None:
        outgoing, self._outgoing = self._outgoing, {}
        for worker, commands in outgoing.items():
            host = self._hosts.get(worker)
            if host is not None:
                host.drive.give(commands)

    def _deliver(self, host: "_Host", call: Callable[[Listener], None], last: bool) -> None:
        """Queue a call of the listener for the loop. Called by worker threads."""
        assert self._loop is not None
        with self._inbox_lock:
            self._inbox.append((host, call, last))
            if self._drain_due:
                return
            self._drain_due = True
        try:
            self._loop.call_soon_threadsafe(self._drain)
        except RuntimeError:  # the loop is closed: there is no listener any more
            with self._inbox_lock:
                self._drain_due = False  # so that the next worker to report notices as well
            host.drive.end()

    def _drain(self) -> None:
        assert self._listener is not None
        assert self._loop is not None
        with self._inbox_lock:
            inbox, self._inbox = self._inbox, deque()
            self._drain_due = False
        try:
            while inbox:
                host, call, last = inbox.popleft()
                if host.silent:
                    continue
                if last:
                    self.stop(host.worker)  # first, so that the listener may already spawn a successor
                call(self._listener)
        finally:
            # The listener raised: its error goes to the loop's handler; other workers' events must not be lost.
            if inbox:
                with self._inbox_lock:
                    self._inbox.extendleft(reversed(inbox))
                    due, self._drain_due = self._drain_due, True
                if not due:
                    self._loop.call_soon(self._drain)


def _join(hosts: list["_Host"], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    for host in hosts:
        host.thread.join(max(0.0, deadline - time.monotonic()))


class _Host:
    """One worker and its thread, as its `Reports`. `silent` is accessed only on the loop."""

    def __init__(
        self,
        worker: WorkerId,
        role: Role,
        factory: str,
        settings: dict[str, Any],
        clock: Callable[[], float],
        deliver: Callable[["_Host", Callable[[Listener], None], bool], None],
    ) -> None:
        self.worker = worker
        self.factory = factory
        self.silent = False
        self.drive = Drive(worker, lambda wake: load(factory)(settings, wake), clock, self)
        self.thread = threading.Thread(target=self.drive.run, name=f"{role.value}:{worker}", daemon=True)
        self._deliver = deliver

    def joined(self, info: WorkerInfo) -> None:
        self._deliver(self, lambda listener: listener.joined(self.worker, info), False)

    def events(self, events: list[WorkerEvent]) -> None:
        self._deliver(self, lambda listener: listener.events(self.worker, events), False)

    def died(self, reason: str) -> None:
        self._deliver(self, lambda listener: listener.died(self.worker, reason), True)
