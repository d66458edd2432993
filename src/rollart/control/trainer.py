"""The controller's side of the trainer: one command at a time, each with a deadline, every failure typed."""

import asyncio
from collections.abc import Sequence
from typing import Any

from rollart.control.context import Context
from rollart.control.fleet import Fleet, WorkerSpec
from rollart.types.errors import OVERDUE, InvariantBroken, TrainerLost, TrainingFailed
from rollart.types.ids import ClaimId, WorkerId
from rollart.types.messages import (
    Publish,
    Published,
    Role,
    Save,
    Saved,
    SaveFailed,
    Train,
    Trained,
    TrainerFailed,
    TrainerInfo,
    WorkerInfo,
)
from rollart.types.trajectory import TrainSample
from rollart.types.versions import Version
from rollart.types.weights import Manifest

POOL = "trainer"
Asked = tuple[type, Version]
"""Key of an outstanding request: the kind of command and its version."""


class TrainerClient:
    """The trainer worker as the pipeline sees it. If it dies, every outstanding request raises `TrainerLost`."""

    def __init__(self, context: Context, fleet: Fleet) -> None:
        self._context = context
        self._fleet = fleet
        self._worker: WorkerId | None = None
        self._restored: Version | None = None
        self.leaves = False
        """The trainer is draining: save a checkpoint, then call `leave`."""
        self._joined: asyncio.Future[None] = context.loop.create_future()
        self._asked: dict[Asked, asyncio.Future[Any]] = {}
        fleet.attach(Role.TRAINER, self)
        fleet.on(Trained, self._trained)
        fleet.on(Published, lambda _, event: self._answer((Publish, event.manifest.version), event.manifest))
        fleet.on(Saved, lambda _, event: self._answer((Save, event.version), None))
        fleet.on(SaveFailed, lambda _, event: self._answer((Save, event.version), event.reason))
        fleet.on(TrainerFailed, self._failed)

    async def joined(self) -> Version | None:
        """Wait for a trainer; return the checkpoint that it starts from, None for a fresh one."""
        while self._worker is None:
            deadlines = self._context.config.deadlines
            # A start that fails is tried again, which the fleet decides.
            limit_s = max(deadlines.train_s, 2 * deadlines.model_loads_s)
            await self._context.waits.wait(
                self._joined, "trainer", "its start", limit_s, "the run stops", TrainingFailed
            )
        return self._restored

    async def train(self, claim: ClaimId, version: Version, samples: Sequence[TrainSample]) -> Trained:
        """One optimiser step; the weights become `version`."""
        limit_s = self._context.config.deadlines.train_s
        trained: Trained = await self._ask(Train(claim, version, tuple(samples)), f"training {version}", limit_s)
        return trained

    async def publish(self, version: Version) -> Manifest:
        """Publish the weights to the store."""
        limit_s = self._context.config.deadlines.publish_s
        manifest: Manifest = await self._ask(Publish(version), f"publishing {version}", limit_s)
        return manifest

    async def save(self, version: Version) -> str | None:
        """Save a checkpoint; return the reason if that failed, in which case the previous one stays."""
        limit_s = self._context.config.deadlines.save_s
        reason: str | None = await self._ask(Save(version), f"saving {version}", limit_s)
        return reason

    def leave(self) -> None:
        """Release a draining trainer; its successor continues from the last checkpoint."""
        assert self._worker is not None
        self._fleet.finished(self._worker)

    async def _ask(self, command: Train | Publish | Save, what: str, limit_s: float) -> Any:
        worker = self._worker
        if worker is None:
            raise TrainerLost(f"{what}: there is no trainer")
        future: asyncio.Future[Any] = self._context.loop.create_future()
        self._asked[type(command), command.version] = future
        accounts = self._context.accounts
        accounts.busy(POOL, +1, self._context.now())
        self._fleet.post(worker, [command])
        wait = self._context.waits.guard(
            str(worker),
            what,
            limit_s,
            "it is replaced",
            lambda wait: self._fleet.replace(worker, f"{wait.what} {OVERDUE} {limit_s:g} s"),
        )
        try:
            return await future
        finally:
            self._context.waits.close(wait)
            self._asked.pop((type(command), command.version), None)
            accounts.busy(POOL, -1, self._context.now())

    def worker_joined(self, worker: WorkerId, spec: WorkerSpec, info: WorkerInfo) -> None:  # noqa: ARG002
        if not isinstance(info, TrainerInfo):
            raise InvariantBroken(f"{worker} is a trainer and described itself as {type(info).__name__}")
        self._worker, self._restored = worker, info.restored
        self._context.accounts.capacity(POOL, +1, self._context.now(), engines=False)
        if not self._joined.done():
            self._joined.set_result(None)

    def worker_leaves(self, worker: WorkerId) -> None:
        self.leaves = worker == self._worker

    def worker_left(self, worker: WorkerId, spec: WorkerSpec, reason: str) -> None:  # noqa: ARG002
        if worker != self._worker:
            return
        self._worker, self.leaves = None, False
        self._joined = self._context.loop.create_future()
        self._context.accounts.capacity(POOL, -1, self._context.now(), engines=False)
        for future in self._asked.values():
            if not future.done():
                future.set_exception(TrainerLost(f"{worker} was lost: {reason}"))

    def _trained(self, worker: WorkerId, event: Trained) -> None:
        self._fleet.succeeded(worker)
        self._answer((Train, event.version), event)

    def _answer(self, asked: Asked, answer: Any) -> None:
        """Resolve an outstanding request; late and duplicate answers are ignored."""
        future = self._asked.get(asked)
        if future is not None and not future.done():
            future.set_result(answer)

    def _failed(self, worker: WorkerId, event: TrainerFailed) -> None:
        """The trainer is alive and refused a command: a retry would fail the same way."""
        kind = Publish if event.claim is None else Train
        for (command, _), future in self._asked.items():
            if command is kind and not future.done():
                future.set_exception(TrainingFailed(f"{worker}: {event.reason}"))
