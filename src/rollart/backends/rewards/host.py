"""Reward host: a worker that runs one reward function in a few threads.

Invariants: a key is computed once however often it is requested, unless it failed with `retry`; a reward is always a
finite number per episode. Each thread has an event loop of its own, for functions that are async.
"""

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import Field

from rollart.backends.rewards.scorer import BadReward, Scorer
from rollart.config.base import Strict
from rollart.ports.worker import Advance
from rollart.types.errors import WRONG_CODE, InvariantBroken
from rollart.types.messages import RewardInfo, Scored, ScoreFailed, ScoreRequest, WorkerCommand, WorkerEvent

REMEMBERED_KEYS = 4096
"""Number of answers kept for de-duplication."""


class RewardHostSettings(Strict):
    function: str
    """Path of the `RewardFunction`, such as `rollart.backends.rewards.functions:episode_return`."""
    slots: int = Field(default=4, ge=1)
    rewards: tuple[str, ...] = ()
    """Rewards that the function computes, as `TASK/REWARD`; empty: all."""


class RewardHost:
    """A reward worker; its factory path is `rollart.backends.rewards.host:RewardHost`."""

    def __init__(self, settings: Mapping[str, Any], wake: Callable[[], None]) -> None:
        self._settings = RewardHostSettings.model_validate(dict(settings))
        self._scorer = Scorer(self._settings.function)
        self._wake = wake
        self._threads = 0
        self._open: set[str] = set()
        self._answers: dict[str, Scored | ScoreFailed] = {}
        self._commands: deque[WorkerCommand] = deque()
        self._questions: queue.SimpleQueue[ScoreRequest | None] = queue.SimpleQueue()
        self._results: deque[Scored | ScoreFailed] = deque()

    def info(self) -> RewardInfo:
        return RewardInfo(slots=self._settings.slots, rewards=self._settings.rewards)

    def post(self, commands: Sequence[WorkerCommand]) -> None:
        self._commands.extend(commands)

    def advance(self, now: float) -> Advance:  # noqa: ARG002 - driven by threads, not by time
        events: list[WorkerEvent] = []
        while self._results:
            events.append(self._take(self._results.popleft()))
        while self._commands:
            command = self._commands.popleft()
            if not isinstance(command, ScoreRequest):
                raise InvariantBroken(f"a reward worker does not accept {type(command).__name__}; a bug in rollart")
            if command.key in self._answers:
                events.append(self._answers[command.key])
            elif command.key not in self._open:
                self._ask(command)
        return Advance(events, None)

    def close(self) -> None:
        """Threads that hang in the function are daemons and end with the process."""
        for _ in range(self._threads):
            self._questions.put(None)

    def _ask(self, question: ScoreRequest) -> None:
        self._open.add(question.key)
        self._questions.put(question)
        if self._threads < min(len(self._open), self._settings.slots):
            self._threads += 1
            threading.Thread(target=self._run, name=f"reward:{self._threads}", daemon=True).start()

    def _take(self, answer: Scored | ScoreFailed) -> Scored | ScoreFailed:
        self._open.discard(answer.key)
        if isinstance(answer, Scored) or not answer.retry:
            self._answers[answer.key] = answer
            if len(self._answers) > REMEMBERED_KEYS:
                del self._answers[next(iter(self._answers))]
        return answer

    def _run(self) -> None:
        with asyncio.Runner() as runner:
            while (question := self._questions.get()) is not None:
                self._results.append(self._answer(question, runner))
                self._wake()

    def _answer(self, question: ScoreRequest, runner: asyncio.Runner) -> Scored | ScoreFailed:
        try:
            transcripts = self._scorer.transcripts(question.episodes)
        except ValueError as error:
            # Not made, cut off or damaged on its way here: asking again would send the same.
            return ScoreFailed(question.key, f"a transcript cannot be read: {error}", retry=False)
        try:
            rewards = self._scorer.score(transcripts, runner)
        except BadReward as error:
            return ScoreFailed(question.key, str(error), retry=False)
        except BaseException as error:  # noqa: BLE001 - the boundary of user code: its errors are attributed to it
            retry = not isinstance(error, WRONG_CODE)
            return ScoreFailed(question.key, f"{type(error).__name__}: {error}", retry)
        return Scored(question.key, rewards.values, rewards.parts)
