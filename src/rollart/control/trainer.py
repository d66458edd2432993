"""The controller's side of the trainer: one command at a time, each with a deadline, every failure typed."""

import asyncio
from collections.abc import Sequence
from typing import TypeVar

from rollart.control.context import Context
from rollart.control.fleet import Fleet, WorkerSpec
from rollart.types.errors import TrainingFailed
from rollart.types.ids import ClaimId, WorkerId
from rollart.types.messages import Publish, Published, Role, Train, Trained, TrainerFailed, WorkerInfo
from rollart.types.trajectory import TrainSample
from rollart.types.versions import Version
from rollart.types.weights import Manifest

POOL = "trainer"
T = TypeVar("T")


class TrainerClient:
    """The trainer worker, as the pipeline sees it."""

    def __init__(self, context: Context, fleet: Fleet) -> None:
        self._context = context
        self._fleet = fleet
        self._worker: WorkerId | None = None
        self._joined: asyncio.Future[None] = context.loop.create_future()
        self._training: tuple[ClaimId, asyncio.Future[Trained]] | None = None
        self._publishing: tuple[Version, asyncio.Future[Manifest]] | None = None
        fleet.attach(Role.TRAINER, self)
        fleet.on(Trained, self._trained)
        fleet.on(Published, self._published)
        fleet.on(TrainerFailed, self._failed)

    async def joined(self) -> None:
        """Return once the trainer is there."""
        limit_s = self._context.config.deadlines.train_s
        await self._context.waits.wait(self._joined, "trainer", "its start", limit_s, "the run stops", TrainingFailed)

    async def train(self, claim: ClaimId, version: Version, samples: Sequence[TrainSample]) -> Trained:
        """One optimiser step; the weights become `version`."""
        future: asyncio.Future[Trained] = self._context.loop.create_future()
        self._training = (claim, future)
        limit_s = self._context.config.deadlines.train_s
        return await self._ask(Train(claim, version, tuple(samples)), future, f"training {version}", limit_s)

    async def publish(self, version: Version) -> Manifest:
        """The weights go to the store."""
        future: asyncio.Future[Manifest] = self._context.loop.create_future()
        self._publishing = (version, future)
        limit_s = self._context.config.deadlines.publish_s
        return await self._ask(Publish(version), future, f"publishing {version}", limit_s)

    async def _ask(self, command: Train | Publish, future: "asyncio.Future[T]", what: str, limit_s: float) -> T:
        if self._worker is None:
            raise TrainingFailed(f"{what}: there is no trainer")
        accounts = self._context.accounts
        accounts.busy(POOL, +1, self._context.now())
        self._fleet.post(self._worker, [command])
        try:
            return await self._context.waits.wait(
                future, str(self._worker), what, limit_s, "the run stops", TrainingFailed
            )
        finally:
            accounts.busy(POOL, -1, self._context.now())

    def worker_joined(self, worker: WorkerId, spec: WorkerSpec, info: WorkerInfo) -> None:  # noqa: ARG002
        self._worker = worker
        self._context.accounts.capacity(POOL, +1, self._context.now(), engines=False)
        if not self._joined.done():
            self._joined.set_result(None)

    def worker_left(self, worker: WorkerId, spec: WorkerSpec, reason: str) -> None:
        """Never called: a lost trainer ends the run (`Fleet.died`)."""

    def _trained(self, worker: WorkerId, event: Trained) -> None:  # noqa: ARG002
        if self._training is not None and self._training[0] == event.claim and not self._training[1].done():
            self._training[1].set_result(event)

    def _published(self, worker: WorkerId, event: Published) -> None:  # noqa: ARG002
        asked = self._publishing
        if asked is not None and asked[0] == event.manifest.version and not asked[1].done():
            asked[1].set_result(event.manifest)

    def _failed(self, worker: WorkerId, event: TrainerFailed) -> None:
        error = TrainingFailed(f"{worker}: {event.reason}")
        if event.claim is not None:
            if self._training is not None and self._training[0] == event.claim and not self._training[1].done():
                self._training[1].set_exception(error)
        elif self._publishing is not None and not self._publishing[1].done():
            self._publishing[1].set_exception(error)
