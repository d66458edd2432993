"""Weight sync: engines stage versions while rollout goes on, and commit them between two engine steps.

`adopt_newest` is steps 2 to 5 of the protocol in `policy.sync`. An engine that does not stage or commit in time is
replaced; the others never wait for it longer than that deadline.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from rollart.control.context import Context
from rollart.control.fleet import Fleet, WorkerSpec
from rollart.control.proxy import LLMProxy
from rollart.policy.liveness import sync_bound_s
from rollart.policy.sync import Commands, SyncBook
from rollart.policy.watch import Wait
from rollart.types.errors import OVERDUE, RunError
from rollart.types.ids import WorkerId
from rollart.types.journal import EngineOutOfService, EngineUpdated, VersionPublished, WeightsSynced
from rollart.types.messages import Role, Stage, Staged, StageFailed, Update, Updated, WorkerInfo
from rollart.types.versions import Version
from rollart.types.weights import Manifest

Answer = Staged | Updated


class VersionObserver(Protocol):
    """Notified when the version of the run has changed, before anything is decided under the new one."""

    def version_changed(self) -> None: ...


class WeightSync:
    """Drives the engines' weights; see the module."""

    def __init__(
        self, context: Context, fleet: Fleet, proxy: LLMProxy, book: SyncBook, observers: Sequence[VersionObserver]
    ) -> None:
        self._context = context
        self._fleet = fleet
        self._proxy = proxy
        self._book = book
        self._observers = observers
        self._waits: dict[tuple[WorkerId, type[Answer]], tuple[Version, Wait]] = {}
        """Outstanding requests per engine. Answers to anything else are late or duplicate, and ignored."""
        self._changed: asyncio.Future[None] | None = None
        self._sync: tuple[float, float] | None = None
        """Start of the wait for the current sync, and start of the sync itself."""
        fleet.attach(Role.ENGINE, self)
        fleet.on(Staged, self._staged)
        fleet.on(StageFailed, self._stage_failed)
        fleet.on(Updated, self._updated)

    def published(self, manifest: Manifest) -> None:
        """A version is in the store: engines stage it from here on."""
        self._context.record(VersionPublished(self._context.now(), manifest.version, manifest.total_bytes))
        self._send(self._book.published(manifest))

    async def first_version(self) -> None:
        """Return once an engine serves."""
        await self._until(lambda: bool(self._book.engines_in_service()))

    async def adopt_newest(self) -> None:
        """Every engine in service takes the newest version; rollout is suspended for the commit only."""
        if self._book.newest == self._book.served:
            return
        asked_at = self._context.now()
        await self._until(self._book.ready)
        began_at = self._context.now()
        rolling = self._context.config.rolling_update
        if not rolling:
            self._suspend(True)
        self._sync = (asked_at, began_at)
        try:
            self._send(self._book.begin())
            self._tell()
            await self._until(lambda: not self._book.syncing)
        finally:
            if not rolling:
                self._suspend(False)

    def _end_sync(self, asked_at: float, began_at: float) -> None:
        """Record the sync and notify observers, at the moment in which the version of the run changes."""
        self._sync = None
        now = self._context.now()
        suspended_s = 0.0 if self._context.config.rolling_update else now - began_at
        self._context.record(WeightsSynced(now, self._book.version(), suspended_s, began_at - asked_at))
        for observer in self._observers:
            observer.version_changed()

    def worker_joined(self, worker: WorkerId, spec: WorkerSpec, info: WorkerInfo) -> None:  # noqa: ARG002
        self._send(self._book.engine_joined(worker))

    def worker_leaves(self, worker: WorkerId) -> None:
        """A draining engine is updated as before until it is gone."""

    def worker_left(self, worker: WorkerId, spec: WorkerSpec, reason: str) -> None:  # noqa: ARG002
        self._answered(worker, Staged)
        self._answered(worker, Updated)
        self._send(self._book.engine_left(worker))
        self._tell()

    def _staged(self, worker: WorkerId, event: Staged) -> None:
        if self._answered(worker, Staged, event.version):
            self._send(self._book.staged(worker, event.version))
            self._tell()

    def _updated(self, worker: WorkerId, event: Updated) -> None:
        if not self._answered(worker, Updated, event.version):
            return
        self._send(self._book.updated(worker, event.version))
        # If the run moved on meanwhile, the engine stages again before it serves anything.
        if self._book.in_service(worker):
            self._context.record(EngineUpdated(self._context.now(), worker, event.version))
            self._proxy.serves(worker, event.version)
        self._tell()

    def _stage_failed(self, worker: WorkerId, event: StageFailed) -> None:
        if not any(asked[0] == event.version for key, asked in self._waits.items() if key[0] == worker):
            return
        commands = self._book.stage_failed(worker, event.version)
        if commands is None:
            self._context.record(EngineOutOfService(self._context.now(), worker, event.reason))
            self._fleet.replace(worker, f"cannot take {event.version}: {event.reason}")
        else:
            self._send(commands)

    def _send(self, commands: Commands) -> None:
        deadlines = self._context.config.deadlines
        for worker, batch in commands:
            self._fleet.post(worker, batch)
            for command in batch:
                if isinstance(command, Stage):
                    self._expect(worker, Staged, command.manifest.version, "staging", deadlines.stage_s)
                elif isinstance(command, Update):
                    self._expect(worker, Updated, command.version, "committing", deadlines.update_s)

    def _expect(self, worker: WorkerId, answer: type[Answer], version: Version, what: str, seconds: float) -> None:
        self._answered(worker, answer)
        wait = self._context.waits.guard(
            str(worker),
            f"{what} {version}",
            seconds,
            "it is replaced",
            lambda wait: self._fleet.replace(worker, f"{wait.what} {OVERDUE} {seconds:g} s"),
        )
        self._waits[worker, answer] = (version, wait)

    def _answered(self, worker: WorkerId, answer: type[Answer], version: Version | None = None) -> bool:
        """Close the wait for this answer (None: any version); return whether there was one."""
        asked = self._waits.get((worker, answer))
        if asked is None or version not in (None, asked[0]):
            return False
        del self._waits[worker, answer]
        self._context.waits.close(asked[1])
        return True

    def _suspend(self, suspended: bool) -> None:
        self._context.accounts.suspended = suspended
        self._context.accounts.changed(self._context.now())
        if suspended:
            self._proxy.suspend()
        else:
            self._proxy.resume()

    def _tell(self) -> None:
        if self._sync is not None and not self._book.syncing:
            self._end_sync(*self._sync)
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait for the engines. Each has its own deadline; this one is a last resort."""
        limit_s = sync_bound_s(self._context.config)
        while not condition():
            self._changed = self._context.loop.create_future()
            owners = ", ".join(self._book.waits_for()) or "engines"
            await self._context.waits.wait(
                self._changed, owners, f"weights {self._book.newest}", limit_s, "the run stops", RunError
            )
