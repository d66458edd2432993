"""A runtime for the suite: its description (`RuntimeHarness`), and a driver that records callbacks (`RuntimeDrive`)."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollart.conformance.case import ConformanceError, check
from rollart.conformance.echo import FACTORY
from rollart.ports.runtime import Runtime
from rollart.types.errors import RuntimeLost
from rollart.types.ids import WorkerId
from rollart.types.messages import Role, Scored, ScoreRequest, WorkerEvent, WorkerInfo
from rollart.types.placement import Node


@dataclass(kw_only=True)
class RuntimeHarness:
    """How to build a runtime, on the running loop, and how to run a loop for it."""

    build: Callable[[], Runtime]
    run: Callable[[Coroutine[Any, Any, None]], None]
    scratch: Path
    """An empty folder that workers can write to."""
    within_s: float = 60.0
    """Maximum time for a worker to join or to answer, on a busy machine."""
    quiet_s: float = 0.1
    """How long to wait for something that must not come."""
    threads: bool = True
    """Whether workers may use threads, which is impossible in virtual time."""
    python: str = ""
    """Another interpreter that workers can run with; empty where they have no process of their own."""


@dataclass(frozen=True)
class ListenerCall:
    """One call of the listener."""

    worker: WorkerId
    what: str
    details: object = None


class RuntimeDrive:
    """A runtime as seen by its listener: all calls of it, and all its callbacks in order."""

    def __init__(self, harness: RuntimeHarness) -> None:
        self.harness = harness
        self.runtime = harness.build()
        self.calls: list[ListenerCall] = []
        self.off_loop: list[ListenerCall] = []
        self.inside: list[ListenerCall] = []
        self.on_joined: Callable[[WorkerId], None] = lambda _worker: None
        self.on_died: Callable[[WorkerId], None] = lambda _worker: None
        self._thread = threading.get_ident()
        self._calling = False
        self._news = asyncio.Event()
        with self._call():
            self.runtime.listen(self)

    async def __aenter__(self) -> "RuntimeDrive":
        return self

    async def __aexit__(self, *details: object) -> None:
        await self.runtime.close()

    # --- listener

    def waits(self, worker: WorkerId, why: str) -> None:
        raise ConformanceError(f"{worker}, which needs nothing, waits: {why}")

    def placed(self, worker: WorkerId, node: str, why: str) -> None:
        """Allowed, and without consequences."""

    def leaves(self, worker: WorkerId, why: str) -> None:
        raise ConformanceError(f"{worker}, which nothing moves, leaves: {why}")

    def nodes_seen(self, nodes: Sequence[Node]) -> None:
        """Allowed, and without consequences."""

    def joined(self, worker: WorkerId, info: WorkerInfo) -> None:
        self._record(ListenerCall(worker, "joined", info))
        self.on_joined(worker)

    def events(self, worker: WorkerId, events: Sequence[WorkerEvent]) -> None:
        for event in events:
            self._record(ListenerCall(worker, "event", event))

    def died(self, worker: WorkerId, reason: str) -> None:
        self._record(ListenerCall(worker, "died", reason))
        self.on_died(worker)

    def failed(self, error: RuntimeLost) -> None:
        raise ConformanceError(f"the runtime failed: {error}")

    def _record(self, call: ListenerCall) -> None:
        self.calls.append(call)
        if threading.get_ident() != self._thread:
            self.off_loop.append(call)
        if self._calling:
            self.inside.append(call)
        self._news.set()

    # --- calls of the runtime

    def spawn(self, name: str, *, factory: str = FACTORY, python: str = "", **settings: object) -> WorkerId:
        worker = WorkerId(name)
        mark = str(self.mark(worker))
        with self._call():
            self.runtime.spawn(worker, Role.REWARD, factory, {"mark": mark, **settings}, python=python)
        return worker

    def post(self, worker: WorkerId, *questions: ScoreRequest) -> None:
        with self._call():
            self.runtime.post(worker, questions)

    def stop(self, worker: WorkerId) -> None:
        with self._call():
            self.runtime.stop(worker)

    @contextmanager
    def _call(self) -> Iterator[None]:
        outer, self._calling = self._calling, True
        try:
            yield
        finally:
            self._calling = outer

    # --- recorded callbacks

    def of(self, worker: WorkerId) -> list[ListenerCall]:
        return [call for call in self.calls if call.worker == worker]

    def keys(self, worker: WorkerId) -> list[str]:
        """Keys of answered questions, in the order of their answers."""
        return [call.details.key for call in self.of(worker) if isinstance(call.details, Scored)]

    def value(self, worker: WorkerId, key: str) -> float:
        return next(
            call.details.values[0]
            for call in self.of(worker)
            if isinstance(call.details, Scored) and call.details.key == key
        )

    def fate(self, worker: WorkerId) -> str:
        """Why the worker died; empty if it has not."""
        return next((f"died: {call.details}" for call in self.of(worker) if call.what == "died"), "")

    async def until(self, condition: Callable[[], object], promise: str) -> None:
        """Wait for something that the contract promises."""
        try:
            async with asyncio.timeout(self.harness.within_s):
                while not condition():
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            recent = [f"{call.worker} {call.what}" for call in self.calls[-6:]]
            raise ConformanceError(
                f"{promise}, but not within {self.harness.within_s:g} s; last callbacks: {recent or 'none'}"
            ) from None

    async def answered(self, worker: WorkerId, *keys: str) -> None:
        await self.until(lambda: set(keys) <= set(self.keys(worker)), f"a worker answers what it is sent, {list(keys)}")

    async def death(self, worker: WorkerId) -> str:
        await self.until(lambda: self.fate(worker), f"`died` follows for {worker}")
        return self.fate(worker)

    async def quiet(self) -> None:
        await asyncio.sleep(self.harness.quiet_s)

    # --- files left by workers

    def mark(self, worker: WorkerId) -> Path:
        return self.harness.scratch / f"{worker}.closed"

    def closings(self, worker: WorkerId) -> int:
        path = self.mark(worker)
        return len(path.read_text().splitlines()) if path.exists() else 0

    async def closed(self, worker: WorkerId) -> None:
        """Check that a worker is closed once; another process may take a while."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.harness.within_s
        while not self.closings(worker) and loop.time() < deadline:  # noqa: ASYNC110 - a file gives no notice
            await asyncio.sleep(0.01)
        await self.quiet()
        count = self.closings(worker)
        check(
            count == 1, f"`close` is called once for every worker, even after a failure, but {count} times for {worker}"
        )
