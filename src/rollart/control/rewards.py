"""Reward dispatch: requests to reward workers, each answered once (`control.scoring` makes them).

Requests carry an idempotency key. They go to a free slot of a reward worker or wait for one (`policy.reward_queue`),
and are retried after a transient failure, a lost worker or a deadline, up to a limit; late and duplicate answers are
ignored. Transcripts are held here, as the workers get them, until the answer is in: a lost worker loses none. Only
finite numbers, one per episode, are an answer.
"""

import math
from collections.abc import Callable

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
from rollart.types.messages import FunctionsUsed, RewardInfo, Role, Scored, ScoreFailed, ScoreRequest, WorkerInfo

POOL = "reward"
WRONG_REWARDS = 8
"""Permanent failures in a row after which the reward function itself is blamed."""


class _Question:
    """An unanswered request: at `worker`, or queued with an open `wait`."""

    __slots__ = ("answered", "ask_by", "attempt_s", "failed", "patience_s", "score", "subject", "wait", "worker")

    def __init__(
        self,
        score: ScoreRequest,
        subject: str,
        attempt_s: float,
        now: float,
        answered: Callable[[Scored], None],
        failed: Callable[[RewardFault], None],
    ) -> None:
        self.score = score
        self.subject = subject
        self.attempt_s = attempt_s
        """Limit of one attempt."""
        self.patience_s = reward_bound_s(attempt_s) - attempt_s
        self.ask_by = now + self.patience_s
        """No attempt starts later."""
        self.answered = answered
        self.failed = failed
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
        self._leaving: dict[WorkerId, None] = {}
        self._attempts: dict[WorkerId, dict[str, Wait]] = {}
        """Slots in use, freed by the answer, the deadline or the end of the worker, even if the request was dropped."""
        self._blame = Blame()
        fleet.attach(Role.REWARD, self)
        fleet.on(Scored, self._scored)
        fleet.on(ScoreFailed, self._score_failed)
        fleet.on(FunctionsUsed, lambda _, event: context.accounts.used(event.uses))

    def ask(
        self,
        score: ScoreRequest,
        subject: str,
        attempt_s: float,
        answered: Callable[[Scored], None],
        failed: Callable[[RewardFault], None],
    ) -> None:
        """Ask for a reward of `subject`; one of the two callbacks is called, once, unless it is forgotten before."""
        question = _Question(score, subject, attempt_s, self._context.now(), answered, failed)
        self._questions[score.key] = question
        self._ask(question)

    def forget(self, key: str) -> None:
        """Drop a request; idempotent."""
        self._close(key)

    def worker_joined(self, worker: WorkerId, spec: WorkerSpec, info: WorkerInfo) -> None:
        if not isinstance(info, RewardInfo):
            raise InvariantBroken(f"{worker} is a reward worker and described itself as {type(info).__name__}")
        self._capacity[worker] = 0 if info.elastic else info.slots
        self._context.accounts.capacity(spec.pool, self._capacity[worker], self._context.now(), engines=False)
        self._attempts[worker] = {}
        for key in self._queue.join(worker, info.slots, info.rewards):
            self._post(worker, self._questions[key])

    def worker_leaves(self, worker: WorkerId) -> None:
        self._leaving[worker] = None
        if self._queue.close(worker):
            self._fleet.finished(worker)

    def worker_left(self, worker: WorkerId, spec: WorkerSpec, reason: str) -> None:
        self._leaving.pop(worker, None)
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
        worker = self._queue.ask(key, question.score.route)
        if worker is not None:
            self._post(worker, question)
            return
        question.wait = self._context.waits.guard(
            POOL,
            f"a free reward worker for {question.subject}",
            max(0.0, question.ask_by - self._context.now()),
            "it ends as reward_failed",
            lambda _: self._failed(question, self._no_slot(question), FailureKind.DEADLINE, retry=False),
        )

    def _no_slot(self, question: _Question) -> str:
        return f"no reward worker was free for {question.patience_s:g} s: raise reward_workers"

    def _post(self, worker: WorkerId, question: _Question) -> None:
        key, seconds = question.score.key, question.attempt_s
        self._stop_waiting(question)
        question.worker = worker
        self._attempts[worker][key] = self._context.waits.guard(
            str(worker),
            f"the reward of {question.subject}",
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
        elif worker in self._leaving and not self._attempts[worker]:
            # Not at once: the caller handles the last answer.
            self._context.call_at(self._context.now(), self._fleet.finished, worker)

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
        problem = _problem(event, len(question.score.episodes))
        if problem:
            self._failed(question, problem, FailureKind.INVALID, retry=False)
            return
        self._close(event.key)
        self._fleet.succeeded(worker)
        self._blame.succeeded(question.score.route)
        question.answered(event)

    def _score_failed(self, worker: WorkerId, event: ScoreFailed) -> None:
        self._free_slot(worker, event.key)
        question = self._questions.get(event.key)
        if question is None or question.worker != worker:
            return
        self._failed(question, event.reason, FailureKind.ERROR, retry=event.retry)
        score = question.score
        if not event.retry and self._blame.failed(score.route, event.key, WRONG_REWARDS):
            raise TaskBroken(
                f"task {score.task!r}: its reward function {score.reward!r} failed {WRONG_REWARDS} times in a row, and "
                f"every try would again: {event.reason}. Fix the function and resume."
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
        question.failed(RewardFault(f"the reward of {question.subject} ({question.score.task}): {reason}", kind))

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


def _problem(answer: Scored, episodes: int) -> str:
    """Why this is not a valid answer for this number of episodes; empty if it is."""
    if not isinstance(answer.values, tuple | list) or len(answer.values) != episodes:
        return f"answered {answer.values!r}, which is not one number per episode ({episodes})"
    for value in answer.values:
        if not _finite(value):
            return f"answered {value!r}, which is not a finite number"
    if answer.parts and len(answer.parts) != episodes:
        return f"answered the named parts of {len(answer.parts)} episodes, and was asked for {episodes}"
    for parts in answer.parts:
        for name, value in parts.items():
            if not _finite(value):
                return f"answered {value!r} as {name!r}, which is not a finite number"
    return ""


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
