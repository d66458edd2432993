"""Environment slots: free, playing, backing off or quarantined; and the answers of those that play.

A slot is one environment of one worker. It is taken for one episode and returned by `release`. A failed slot backs off
before it gets work again, longer each time and with jitter, so that slots that failed together do not come back
together; other slots are not affected.

An episode may be stopped while its environment works on an answer (its group was claimed, or it is replaced). The slot
then stays taken until the answer comes, and fails at the deadline if it does not: otherwise an environment that always
hangs would look healthy, because nothing waits for it to the end.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from rollart.control.context import Context
from rollart.control.fleet import Fleet, WorkerSpec
from rollart.policy.blame import Blame
from rollart.policy.health import ENVIRONMENT, GiveUp, HealthBook, Quarantine, Retry
from rollart.policy.watch import Wait
from rollart.types.errors import EnvironmentFault, InvariantBroken, TaskBroken
from rollart.types.failures import FailureKind
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


class Slot:
    """One environment, and the pending `answer` to `turn` of its episode, if any."""

    __slots__ = ("answer", "index", "name", "task", "turn", "worker")

    def __init__(self, worker: WorkerId, index: int, task: str) -> None:
        self.worker = worker
        self.index = index
        self.task = task
        self.name = f"{worker}#{index}"
        self.turn = 0
        self.answer: asyncio.Future[Observed] | None = None


class EnvironmentPool:
    """All slots of all tasks."""

    def __init__(self, context: Context, fleet: Fleet, slot_freed: Callable[[], None]) -> None:
        self._context = context
        self._fleet = fleet
        self._slot_freed = slot_freed
        self._health = HealthBook(ENVIRONMENT, context.config.seed)
        self._free: dict[str, deque[Slot]] = {}
        self._workers: dict[WorkerId, int] = {}
        self._taken: dict[WorkerId, int] = {}
        """Number of slots of a worker between `take` and `release`."""
        self._leaving: dict[WorkerId, None] = {}
        """Workers whose episodes finish, and that get no new ones."""
        self._playing: dict[TrajectoryId, Slot] = {}
        """Slots by open episode."""
        self._abandoned: dict[TrajectoryId, tuple[Slot, Wait]] = {}
        """Slots of stopped episodes whose environments have not answered yet."""
        self._blame = Blame()
        fleet.attach(Role.ENVIRONMENT, self)
        fleet.on(Observed, self._observed)
        fleet.on(EnvironmentFailed, self._environment_failed)

    def free(self, task: str) -> int:
        return len(self._free.get(task, ()))

    def take(self, task: str) -> Slot:
        slot = self._free[task].popleft()
        self._taken[slot.worker] += 1
        return slot

    def release(self, slot: Slot, fault: str | None) -> None:
        """Return a slot after its episode; `fault` is the failure of the environment, if it failed."""
        if slot.worker not in self._workers:
            return
        self._taken[slot.worker] -= 1
        if slot.worker in self._leaving:
            self._finish_leaving(slot.worker)
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
        """An episode of the task produced a result, so the code of the task works."""
        self._blame.succeeded(task)

    def reset(self, slot: Slot, trajectory: Trajectory) -> "asyncio.Future[Observed]":
        """Start an episode in a fresh environment."""
        self._playing[trajectory.id] = slot
        return self._ask(slot, 0, Reset(trajectory.id, slot.index, trajectory.prompt, trajectory.member))

    def step(self, slot: Slot, trajectory: Trajectory, action: Segment) -> "asyncio.Future[Observed]":
        """Act; the turn is the trajectory's."""
        turn = trajectory.turns
        return self._ask(slot, turn, Step(trajectory.id, turn, action))

    def close(self, slot: Slot, trajectory: Trajectory) -> None:
        """The episode is over or given up."""
        self._playing.pop(trajectory.id, None)
        self._fleet.post(slot.worker, [Close(trajectory.id)])

    def abandon(self, slot: Slot, trajectory: Trajectory, deadline: float) -> None:
        """The episode was stopped while its environment works on an answer, due by `deadline`."""
        del self._playing[trajectory.id]
        wait = self._context.waits.guard(
            slot.name,
            f"an answer for trajectory {trajectory.id}, which was stopped",
            max(0.0, deadline - self._context.now()),
            "it gets a fresh one",
            lambda wait: self._end_abandoned(trajectory.id, f"no answer within its deadline ({wait.what})"),
        )
        self._abandoned[trajectory.id] = (slot, wait)

    def _end_abandoned(self, episode: TrajectoryId, fault: str | None) -> None:
        slot, wait = self._abandoned.pop(episode)
        self._context.waits.close(wait)
        self._context.accounts.busy(POOL, -1, self._context.now())
        if slot.worker in self._workers:
            self._fleet.post(slot.worker, [Close(episode)])
            self.release(slot, fault)

    def _answers_abandoned(self, worker: WorkerId, event: Observed | EnvironmentFailed) -> bool:
        """Whether this is the answer that a stopped episode's slot waits for."""
        if event.episode not in self._abandoned:
            return False
        slot = self._abandoned[event.episode][0]
        return slot.worker == worker and slot.turn == event.turn

    def worker_joined(self, worker: WorkerId, spec: WorkerSpec, info: WorkerInfo) -> None:
        if not isinstance(info, EnvironmentInfo):
            raise InvariantBroken(f"{worker} is an environment worker and described itself as {type(info).__name__}")
        self._workers[worker] = info.slots
        self._taken[worker] = 0
        self._context.accounts.capacity(spec.pool, info.slots, self._context.now(), engines=False)
        free = self._free.setdefault(info.task, deque())
        free.extend(Slot(worker, index, info.task) for index in range(info.slots))
        self._slot_freed()

    def worker_leaves(self, worker: WorkerId) -> None:
        self._leaving[worker] = None
        for task, free in self._free.items():
            self._free[task] = deque(slot for slot in free if slot.worker != worker)
        self._finish_leaving(worker)

    def _finish_leaving(self, worker: WorkerId) -> None:
        """Stop a draining worker once its last episode has ended."""
        if not self._taken[worker]:
            self._fleet.finished(worker)

    def worker_left(self, worker: WorkerId, spec: WorkerSpec, reason: str) -> None:
        self._leaving.pop(worker, None)
        self._taken.pop(worker, None)
        slots = self._workers.pop(worker, 0)
        self._context.accounts.capacity(spec.pool, -slots, self._context.now(), engines=False)
        for task, free in self._free.items():
            self._free[task] = deque(slot for slot in free if slot.worker != worker)
        for episode, (slot, _) in list(self._abandoned.items()):
            if slot.worker == worker:
                self._end_abandoned(episode, None)
        for slot in list(self._playing.values()):
            if slot.worker == worker and slot.answer is not None and not slot.answer.done():
                slot.answer.set_exception(EnvironmentFault(f"{worker} was lost: {reason}", FailureKind.WORKER_LOST))

    def _put_back(self, slot: Slot) -> None:
        if slot.worker in self._workers and slot.worker not in self._leaving:
            self._free[slot.task].append(slot)
            self._slot_freed()

    def _ask(self, slot: Slot, turn: int, command: Reset | Step) -> "asyncio.Future[Observed]":
        slot.turn = turn
        slot.answer = future = self._context.loop.create_future()
        if slot.worker in self._workers:
            self._fleet.post(slot.worker, [command])
        else:
            future.set_exception(EnvironmentFault(f"{slot.worker} is gone", FailureKind.WORKER_LOST))
        return future

    def _answer(self, worker: WorkerId, episode: TrajectoryId, turn: int) -> "asyncio.Future[Observed] | None":
        """The future that waits for exactly this answer; None for late and duplicate ones."""
        slot = self._playing.get(episode)
        if slot is None or slot.worker != worker or slot.turn != turn:
            return None
        answer, slot.answer = slot.answer, None
        return None if answer is None or answer.done() else answer

    def _observed(self, worker: WorkerId, event: Observed) -> None:
        if self._answers_abandoned(worker, event):
            self._end_abandoned(event.episode, None)
            return
        future = self._answer(worker, event.episode, event.turn)
        if future is not None:
            future.set_result(event)

    def _environment_failed(self, worker: WorkerId, event: EnvironmentFailed) -> None:
        if self._answers_abandoned(worker, event):
            slot = self._abandoned[event.episode][0]
            self._end_abandoned(event.episode, event.reason)
        else:
            future = self._answer(worker, event.episode, event.turn)
            if future is None:
                return
            future.set_exception(EnvironmentFault(event.reason))
            slot = self._playing[event.episode]
        slots = self._context.config.tasks[slot.task].environments
        if event.permanent and self._blame.failed(slot.task, slot.name, slots):
            raise TaskBroken(
                f"task {slot.task!r}: all of its {slots} environments failed, and every try would again: "
                f"{event.reason}. Fix the environment and resume."
            )
