"""Reward dispatch: every finished episode is scored once, and only its own trajectory waits for it.

Requests carry an idempotency key. They go to a free slot of a reward worker or wait for one (`policy.reward_queue`),
and are retried after a transient failure, a lost worker or a deadline, up to a limit; late and duplicate answers are
ignored. Only a finite number is a reward.
"""

import asyncio
import math

from rollart.control.context import Context
from rollart.control.fleet import Fleet, WorkerSpec
from rollart.policy.blame import Blame
from rollart.policy.health import REWARD, HealthBook, Retry
from rollart.policy.liveness import reward_bound_s
from rollart.policy.reward_queue import RewardQueue
from rollart.policy.watch import Wait
from rollart.types.errors import InvariantBroken, RewardFault, TaskBroken
from rollart.types.failures import FailureKind
from rollart.types.ids import WorkerId
from rollart.types.journal import RewardArrived
from rollart.types.messages import RewardInfo, Role, Scored, ScoreFailed, ScoreRequest, WorkerInfo
from rollart.types.trajectory import Trajectory

POOL = "reward"
WRONG_REWARDS = 8
"""Permanent failures in a row after which the reward function itself is blamed."""


class _Question:
    """A reward that a trajectory waits for. `worker` holds it, or `wait` is open while it is in the queue."""

    __slots__ = ("ask_by", "future", "score", "wait", "worker")

    def __init__(self, score: ScoreRequest, future: "asyncio.Future[float]", ask_by: float) -> None:
        self.score = score
        self.future = future
        self.ask_by = ask_by
        """No attempt starts later."""
        self.worker: WorkerId | None = None
        self.wait: Wait | None = None


class RewardDispatch:
    """Score requests in flight, by key."""

    def __init__(self, context: Context, fleet: Fleet) -> None:
        self._context = context
        self._fleet = fleet
        self._health = HealthBook(REWARD, context.config.seed)
        self._queue = RewardQueue()
        self._capacity: dict[WorkerId, int] = {}
        self._questions: dict[str, _Question] = {}
        self._attempts: dict[WorkerId, dict[str, Wait]] = {}
        """Slots in use: until the answer, the deadline, or the end of the worker, wanted or not."""
        self._attempt_s = context.config.deadlines.reward_s
        self._patience_s = reward_bound_s(context.config) - self._attempt_s
        self._no_slot = f"no reward worker was free for {self._patience_s:g} s: raise reward_workers"
        self._blame = Blame()
        fleet.attach(Role.REWARD, self)
        fleet.on(Scored, self._scored)
        fleet.on(ScoreFailed, self._score_failed)

    def score(self, trajectory: Trajectory) -> "asyncio.Future[float]":
        """The final reward of a finished episode, or a `RewardFault`."""
        score = ScoreRequest(
            key=f"t{trajectory.id}",
            trajectory=trajectory.id,
            task=trajectory.task,
            prompt=trajectory.prompt,
            turn_rewards=tuple(trajectory.turn_rewards),
            artifact=trajectory.artifact,
            truncated=trajectory.truncated,
        )
        ask_by = self._context.now() + self._patience_s
        question = self._questions[score.key] = _Question(score, self._context.loop.create_future(), ask_by)
        self._ask(question)
        return question.future

    def forget(self, trajectory: Trajectory) -> None:
        """Drop the request of a trajectory; idempotent."""
        self._close(f"t{trajectory.id}")

    def worker_joined(self, worker: WorkerId, spec: WorkerSpec, info: WorkerInfo) -> None:
        if not isinstance(info, RewardInfo):
            raise InvariantBroken(f"{worker} is a reward worker and described itself as {type(info).__name__}")
        self._capacity[worker] = 0 if info.elastic else info.slots
        self._context.accounts.capacity(spec.pool, self._capacity[worker], self._context.now(), engines=False)
        self._attempts[worker] = {}
        for key in self._queue.join(worker, info.slots, info.tasks):
            self._post(worker, self._questions[key])

    def worker_left(self, worker: WorkerId, spec: WorkerSpec, reason: str) -> None:
        if worker not in self._attempts:
            return
        self._context.accounts.capacity(spec.pool, -self._capacity.pop(worker), self._context.now(), engines=False)
        for key in self._queue.leave(worker):
            self._end_attempt(worker, key)
            question = self._questions.get(key)
            if question is not None and question.worker == worker:
                self._failed(question, f"{worker} was lost: {reason}", FailureKind.WORKER_LOST, retry=True)
        del self._attempts[worker]

    def _ask(self, question: _Question) -> None:
        """Post the question to a free slot, or let it wait for one."""
        key = question.score.key
        if self._questions.get(key) is not question:
            return
        worker = self._queue.ask(key, question.score.task)
        if worker is not None:
            self._post(worker, question)
            return
        question.wait = self._context.waits.guard(
            POOL,
            f"a free reward worker for trajectory {question.score.trajectory}",
            max(0.0, question.ask_by - self._context.now()),
            "it ends as reward_failed",
            lambda _: self._failed(question, self._no_slot, FailureKind.DEADLINE, retry=False),
        )

    def _post(self, worker: WorkerId, question: _Question) -> None:
        key, seconds = question.score.key, self._attempt_s
        self._stop_waiting(question)
        question.worker = worker
        self._attempts[worker][key] = self._context.waits.guard(
            str(worker),
            f"the reward of trajectory {question.score.trajectory}",
            seconds,
            "it is asked for again",
            lambda _: self._overdue(worker, key, f"no answer within {seconds:g} s"),
        )
        self._context.accounts.busy(POOL, +1, self._context.now())
        self._fleet.post(worker, [question.score])

    def _overdue(self, worker: WorkerId, key: str, reason: str) -> None:
        self._free_slot(worker, key)
        question = self._questions.get(key)
        if question is not None and question.worker == worker:
            self._failed(question, reason, FailureKind.DEADLINE, retry=True)

    def _free_slot(self, worker: WorkerId, key: str) -> None:
        """An attempt is over: the oldest question that waits gets the slot."""
        self._end_attempt(worker, key)
        waiting = self._queue.free(worker, key)
        if waiting is not None:
            self._post(worker, self._questions[waiting])

    def _end_attempt(self, worker: WorkerId, key: str) -> None:
        wait = self._attempts[worker].pop(key, None)
        if wait is not None:
            self._context.waits.close(wait)
            self._context.accounts.busy(POOL, -1, self._context.now())

    def _scored(self, worker: WorkerId, event: Scored) -> None:
        self._free_slot(worker, event.key)
        question = self._questions.get(event.key)
        if question is None:
            return
        value = event.value
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            self._failed(
                question, f"answered {value!r}, which is not a finite number", FailureKind.INVALID, retry=False
            )
            return
        self._close(event.key)
        self._fleet.succeeded(worker)
        self._blame.succeeded(question.score.task)
        if not question.future.done():
            self._context.record(RewardArrived(self._context.now(), question.score.trajectory, float(value)))
            question.future.set_result(float(value))

    def _score_failed(self, worker: WorkerId, event: ScoreFailed) -> None:
        self._free_slot(worker, event.key)
        question = self._questions.get(event.key)
        if question is None or question.worker != worker:
            return
        self._failed(question, event.reason, FailureKind.ERROR, retry=event.retry)
        task = question.score.task
        if not event.retry and self._blame.failed(task, event.key, WRONG_REWARDS):
            raise TaskBroken(
                f"task {task!r}: its reward function failed {WRONG_REWARDS} times in a row, and every try would again: "
                f"{event.reason}. Fix the function and resume."
            )

    def _failed(self, question: _Question, reason: str, kind: FailureKind, *, retry: bool) -> None:
        key = question.score.key
        if self._questions.get(key) is not question:
            return
        question.worker = None
        verdict = self._health.failed(key, self._context.now(), reason) if retry else None
        if isinstance(verdict, Retry) and verdict.at < question.ask_by:
            self._context.call_at(verdict.at, self._ask, question)
            return
        self._close(key)
        if not question.future.done():
            question.future.set_exception(
                RewardFault(
                    f"the reward of trajectory {question.score.trajectory} ({question.score.task}): {reason}", kind
                )
            )

    def _close(self, key: str) -> None:
        question = self._questions.pop(key, None)
        if question is not None:
            self._stop_waiting(question)
            self._queue.forget(key)
            self._health.forget(key)

    def _stop_waiting(self, question: _Question) -> None:
        if question.wait is not None:
            self._context.waits.close(question.wait)
            question.wait = None
