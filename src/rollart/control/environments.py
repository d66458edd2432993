"""Environment slots: who is free, who failed, and the answers of those at work.

A slot is one environment of one worker. It is taken for one episode and comes back by `release`. A slot that failed
rests before it gets work again, longer each time, and is given up in the end; the others never notice.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from rollart.control.context import Context
from rollart.control.fleet import Fleet, WorkerSpec
from rollart.policy.blame import Blame
from rollart.policy.health import ENVIRONMENT, GiveUp, HealthBook, Quarantine, Retry
from rollart.types.errors import EnvironmentFault, InvariantBroken, TaskBroken
from rollart.types.ids import TrajectoryId, WorkerId
from rollart.types.journal import Quarantined
from rollart.types.messages import (
    Close,
    EnvironmentFailed,
    EnvironmentInfo,
    Observed,
    Reset,
    Role,
    Step,
    WorkerInfo,
)
from rollart.types.tokens import Segment
from rollart.types.trajectory import Trajectory

POOL = "environments"


@dataclass(frozen=True, slots=True)
class Slot:
    """One environment."""

    worker: WorkerId
    index: int
    task: str
    name: str


class EnvironmentPool:
    """All slots of all tasks."""

    def __init__(self, context: Context, fleet: Fleet) -> None:
        self._context = context
        self._fleet = fleet
        self._health = HealthBook(ENVIRONMENT)
        self._free: dict[str, deque[Slot]] = {}
        self._workers: dict[WorkerId, int] = {}
        self._asked: dict[TrajectoryId, tuple[Slot, int, asyncio.Future[Observed]]] = {}
        self._blame = Blame()
        self.changed: Callable[[], None] = lambda: None
        """Told when a slot became free."""
        fleet.attach(Role.ENVIRONMENT, self)
        fleet.on(Observed, self._observed)
        fleet.on(EnvironmentFailed, self._environment_failed)

    def free(self, task: str) -> int:
        return len(self._free.get(task, ()))

    def take(self, task: str) -> Slot:
        return self._free[task].popleft()

    def release(self, slot: Slot, fault: str | None) -> None:
        """The episode is over. `fault` says what was wrong with the environment, None if nothing was."""
        if slot.worker not in self._workers:
            return
        now = self._context.now()
        if fault is None:
            self._fleet.succeeded(slot.worker)
            self._health.succeeded(slot.name, now)
            self._put_back(slot)
            return
        verdict = self._health.failed(slot.name, now, fault)
        match verdict:
            case Retry(at=at):
                self._context.call_at(at, self._put_back, slot)
            case Quarantine(until=until, failures=failures):
                self._context.record(Quarantined(now, slot.name, failures, until, fault))
                self._context.call_at(until, self._put_back, slot)
            case GiveUp():
                self._context.record(Quarantined(now, slot.name, 0, -1.0, f"given up: {fault}"))

    def played(self, task: str) -> None:
        """An episode came to its own end, not only to a stop: the code of the task works."""
        self._blame.succeeded(task)

    def reset(self, slot: Slot, trajectory: Trajectory) -> "asyncio.Future[Observed]":
        """Start an episode in a fresh environment."""
        future = self._expect(slot, trajectory.id, 0)
        self._fleet.post(slot.worker, [Reset(trajectory.id, slot.index, trajectory.prompt, trajectory.member)])
        return future

    def step(self, slot: Slot, trajectory: Trajectory, action: Segment) -> "asyncio.Future[Observed]":
        """Act; the turn is the trajectory's."""
        future = self._expect(slot, trajectory.id, trajectory.turns)
        self._fleet.post(slot.worker, [Step(trajectory.id, trajectory.turns, action)])
        return future

    def close(self, slot: Slot, trajectory: Trajectory) -> None:
        """The episode is over or given up."""
        self._asked.pop(trajectory.id, None)
        self._fleet.post(slot.worker, [Close(trajectory.id)])

    def worker_joined(self, worker: WorkerId, spec: WorkerSpec, info: WorkerInfo) -> None:
        if not isinstance(info, EnvironmentInfo):
            raise InvariantBroken(f"{worker} is an environment worker and described itself as {type(info).__name__}")
        self._workers[worker] = info.slots
        self._context.accounts.capacity(spec.pool, info.slots, self._context.now(), engines=False)
        free = self._free.setdefault(info.task, deque())
        free.extend(Slot(worker, index, info.task, f"{worker}#{index}") for index in range(info.slots))
        self.changed()

    def worker_left(self, worker: WorkerId, spec: WorkerSpec, reason: str) -> None:
        slots = self._workers.pop(worker, 0)
        self._context.accounts.capacity(spec.pool, -slots, self._context.now(), engines=False)
        for task, free in self._free.items():
            self._free[task] = deque(slot for slot in free if slot.worker != worker)
        for slot, _, future in list(self._asked.values()):
            if slot.worker == worker and not future.done():
                future.set_exception(EnvironmentFault(f"{worker} was lost: {reason}"))

    def _put_back(self, slot: Slot) -> None:
        if slot.worker in self._workers:
            self._free[slot.task].append(slot)
            self.changed()

    def _expect(self, slot: Slot, episode: TrajectoryId, turn: int) -> "asyncio.Future[Observed]":
        future: asyncio.Future[Observed] = self._context.loop.create_future()
        self._asked[episode] = (slot, turn, future)
        if slot.worker not in self._workers:
            future.set_exception(EnvironmentFault(f"{slot.worker} is gone"))
        return future

    def _asked_for(
        self, worker: WorkerId, event: Observed | EnvironmentFailed
    ) -> "tuple[Slot, asyncio.Future[Observed]] | None":
        """Who waits for exactly this answer, and where; None for late and doubled ones."""
        asked = self._asked.get(event.episode)
        if asked is None or asked[0].worker != worker or asked[1] != event.turn or asked[2].done():
            return None
        return asked[0], asked[2]

    def _observed(self, worker: WorkerId, event: Observed) -> None:
        asked = self._asked_for(worker, event)
        if asked is not None:
            asked[1].set_result(event)

    def _environment_failed(self, worker: WorkerId, event: EnvironmentFailed) -> None:
        asked = self._asked_for(worker, event)
        if asked is None:
            return
        slot, future = asked
        future.set_exception(EnvironmentFault(event.reason))
        slots = self._context.config.tasks[slot.task].environments
        if event.wrong and self._blame.failed(slot.task, slot.name, slots):
            raise TaskBroken(
                f"task {slot.task!r}: all of its {slots} environments failed, and every try would again: "
                f"{event.reason}. Mend the environment and resume."
            )
