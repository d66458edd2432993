"""Weight sync: versions reach the engines while rollout goes on, and change hands between two engine steps.

`adopt_newest` is steps 2 to 5 of the protocol in `policy.sync`. An engine that does not stage or commit in time is
replaced; the others never wait longer than that deadline for it.
"""

import asyncio
from collections.abc import Callable

from rollart.control.context import Context
from rollart.control.fleet import Fleet, WorkerSpec
from rollart.control.proxy import LLMProxy
from rollart.policy.liveness import sync_bound_s
from rollart.policy.sync import Commands, SyncBook
from rollart.policy.watch import Wait
from rollart.types.errors import OVERDUE, InvariantBroken, RunError
from rollart.types.ids import WorkerId
from rollart.types.journal import EngineOutOfService, EngineUpdated, VersionPublished, WeightsSynced
from rollart.types.messages import Role, Stage, Staged, StageFailed, Update, Updated, WorkerInfo
from rollart.types.versions import Version
from rollart.types.weights import Manifest

Answer = Staged | Updated


class WeightSync:
    """Drives the engines' weights; see the module."""

    def __init__(self, context: Context, fleet: Fleet, proxy: LLMProxy) -> None:
        self._context = context
        self._fleet = fleet
        self._proxy = proxy
        self._book = SyncBook(rolling=context.config.rolling_update)
        self._waits: dict[tuple[WorkerId, type[Answer]], tuple[Version, Wait]] = {}
        """What every engine was asked for. An answer to anything else is late or doubled, and void."""
        self._changed: asyncio.Future[None] | None = None
        self._sync: tuple[float, float] | None = None
        """When the sync under way was asked for, and when it began."""
        self._newest_in_service: Version | None = None
        self.synced: Callable[[Version], None] = lambda _version: None
        """Told when the version of the run has changed."""
        fleet.attach(Role.ENGINE, self)
        fleet.on(Staged, self._staged)
        fleet.on(StageFailed, self._stage_failed)
        fleet.on(Updated, self._updated)

    @property
    def served(self) -> Version:
        """The version of the run: while engines take a new one in turn, that of those that have it."""
        served, newest = self._book.served, self._newest_in_service
        if served is None:
            raise InvariantBroken("asked for the version in service before there was one")
        return served if newest is None or newest <= served else newest

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
        """At the moment in which the version of the run changes, before anything is decided with the new one."""
        self._sync = None
        now = self._context.now()
        suspended_s = 0.0 if self._context.config.rolling_update else now - began_at
        self._context.record(WeightsSynced(now, self.served, suspended_s, began_at - asked_at))
        self.synced(self.served)

    def worker_joined(self, worker: WorkerId, spec: WorkerSpec, info: WorkerInfo) -> None:  # noqa: ARG002
        self._send(self._book.engine_joined(worker))

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
        # Not in service if the run moved on meanwhile: then it stages again, and nothing is sampled with this version.
        if self._book.in_service(worker):
            self._context.record(EngineUpdated(self._context.now(), worker, event.version))
            self._newest_in_service = max(event.version, self._newest_in_service or event.version)
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
        """Whether this answer (None: whichever) was waited for; if so it no longer is."""
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
        """Wait for the engines. Each of them has a deadline of its own; this one only catches what those leave open."""
        limit_s = sync_bound_s(self._context.config)
        while not condition():
            self._changed = self._context.loop.create_future()
            owners = ", ".join(self._book.waits_for()) or "engines"
            await self._context.waits.wait(
                self._changed, owners, f"weights {self._book.newest}", limit_s, "the run stops", RunError
            )
