"""Reward dispatch: each finished episode is scored once, without anybody waiting but its own trajectory.

A question has an idempotency key. It is asked again after a failure that may pass, a lost worker or a deadline, up to a
limit; late and doubled answers are ignored. Only a finite number is a reward.
"""

import asyncio
import math

from rollart.control.context import Context
from rollart.control.fleet import Fleet, WorkerSpec
from rollart.policy.blame import Blame
from rollart.policy.health import REWARD, HealthBook, Retry
from rollart.policy.watch import Wait
from rollart.types.errors import InvariantBroken, RewardFault, TaskBroken
from rollart.types.ids import WorkerId
from rollart.types.journal import RewardArrived
from rollart.types.messages import RewardInfo, Role, Score, Scored, ScoreFailed, WorkerInfo
from rollart.types.trajectory import Trajectory

POOL = "reward"
WRONG_REWARDS = 8
"""So many trajectories in a row without a reward that any try could get: then it is the function."""


class _Question:
    __slots__ = ("future", "score", "wait", "worker")

    def __init__(self, score: Score, future: "asyncio.Future[float]") -> None:
        self.score = score
        self.future = future
        self.worker: WorkerId | None = None
        self.wait: Wait | None = None


class RewardDispatch:
    """Questions in flight, by key."""

    def __init__(self, context: Context, fleet: Fleet) -> None:
        self._context = context
        self._fleet = fleet
        self._health = HealthBook(REWARD)
        self._workers: dict[WorkerId, int] = {}
        self._slots: dict[WorkerId, int] = {}
        self._tasks: dict[WorkerId, tuple[str, ...]] = {}
        self._capacity: dict[WorkerId, int] = {}
        self._questions: dict[str, _Question] = {}
        self._blame = Blame()
        fleet.attach(Role.REWARD, self)
        fleet.on(Scored, self._scored)
        fleet.on(ScoreFailed, self._score_failed)

    def score(self, trajectory: Trajectory) -> "asyncio.Future[float]":
        """The final reward of a finished episode, or a `RewardFault`."""
        score = Score(
            key=f"t{trajectory.id}",
            trajectory=trajectory.id,
            task=trajectory.task,
            prompt=trajectory.prompt,
            turn_rewards=tuple(trajectory.turn_rewards),
            artifact=trajectory.artifact,
            truncated=trajectory.truncated,
        )
        question = self._questions[score.key] = _Question(score, self._context.loop.create_future())
        self._ask(question)
        return question.future

    def forget(self, trajectory: Trajectory) -> None:
        """Nobody wants the answer any more."""
        self._close(f"t{trajectory.id}")

    def worker_joined(self, worker: WorkerId, spec: WorkerSpec, info: WorkerInfo) -> None:
        if not isinstance(info, RewardInfo):
            raise InvariantBroken(f"{worker} is a reward worker and described itself as {type(info).__name__}")
        self._workers[worker] = 0
        self._slots[worker] = info.slots
        self._tasks[worker] = info.tasks
        self._capacity[worker] = 0 if info.elastic else info.slots
        self._context.accounts.capacity(spec.pool, self._capacity[worker], self._context.now(), engines=False)
        for question in list(self._questions.values()):
            if question.worker is None:
                self._ask(question)

    def worker_left(self, worker: WorkerId, spec: WorkerSpec, reason: str) -> None:
        if self._workers.pop(worker, None) is None:
            return
        del self._slots[worker], self._tasks[worker]
        self._context.accounts.capacity(spec.pool, -self._capacity.pop(worker), self._context.now(), engines=False)
        for question in list(self._questions.values()):
            if question.worker == worker:
                self._failed(question, f"{worker} was lost: {reason}", retry=True)

    def _ask(self, question: _Question) -> None:
        if self._questions.get(question.score.key) is not question or question.worker is not None:
            return
        worker = self._least_loaded(question.score.task)
        seconds = self._context.config.deadlines.reward_s
        if question.wait is not None:
            self._context.waits.close(question.wait)
        question.wait = self._context.waits.guard(
            str(worker or POOL),
            f"the reward of trajectory {question.score.trajectory}",
            seconds,
            "it is asked for again",
            lambda _: self._failed(question, f"no answer within {seconds:g} s", retry=True),
        )
        if worker is None:
            return
        question.worker = worker
        self._workers[worker] += 1
        self._context.accounts.busy(POOL, +1, self._context.now())
        self._fleet.post(worker, [question.score])

    def _least_loaded(self, task: str) -> WorkerId | None:
        able = [worker for worker in self._workers if task in self._tasks[worker] or not self._tasks[worker]]
        return min(able, key=lambda worker: self._workers[worker] / self._slots[worker], default=None)

    def _scored(self, worker: WorkerId, event: Scored) -> None:
        question = self._questions.get(event.key)
        if question is None:
            return
        value = event.value
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            self._failed(question, f"answered {value!r}, which is not a finite number", retry=False)
            return
        self._close(event.key)
        self._fleet.succeeded(worker)
        self._blame.succeeded(question.score.task)
        if not question.future.done():
            self._context.record(RewardArrived(self._context.now(), question.score.trajectory, float(value)))
            question.future.set_result(float(value))

    def _score_failed(self, worker: WorkerId, event: ScoreFailed) -> None:
        question = self._questions.get(event.key)
        if question is None or question.worker != worker:
            return
        self._failed(question, event.reason, retry=event.retry)
        task = question.score.task
        if not event.retry and self._blame.failed(task, event.key, WRONG_REWARDS):
            raise TaskBroken(
                f"task {task!r}: its reward function failed {WRONG_REWARDS} times in a row, and every try would again: "
                f"{event.reason}. Mend the function and resume."
            )

    def _failed(self, question: _Question, reason: str, *, retry: bool) -> None:
        key = question.score.key
        if self._questions.get(key) is not question:
            return
        self._free(question)
        verdict = self._health.failed(key, self._context.now(), reason) if retry else None
        if isinstance(verdict, Retry):
            self._context.call_at(verdict.at, self._ask, question)
            return
        self._close(key)
        if not question.future.done():
            question.future.set_exception(
                RewardFault(f"the reward of trajectory {question.score.trajectory} ({question.score.task}): {reason}")
            )

    def _close(self, key: str) -> None:
        question = self._questions.pop(key, None)
        if question is not None:
            self._free(question)
            self._health.forget(key)

    def _free(self, question: _Question) -> None:
        if question.wait is not None:
            self._context.waits.close(question.wait)
            question.wait = None
        worker, question.worker = question.worker, None
        if worker is not None:
            self._context.accounts.busy(POOL, -1, self._context.now())
            if worker in self._workers:
                self._workers[worker] -= 1
