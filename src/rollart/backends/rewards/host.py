"""Reward host: a worker that runs one reward function in a few threads.

Each thread has an event loop of its own, for functions that are async. A function that hangs keeps its thread: where
that may happen, `processes` (`replica_host`) are the better place.
"""

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import Field

from rollart.backends.rewards.scorer import Scorer
from rollart.backends.rewards.shell import RewardShell
from rollart.config.base import Strict
from rollart.types.messages import RewardInfo, ScoreRequest
from rollart.types.reward_use import RewardUse


class RewardHostSettings(Strict):
    function: str
    """Path of the `RewardFunction`, such as `rollart.backends.rewards.functions:episode_return`."""
    slots: int = Field(default=4, ge=1)
    price: float = 0.0
    """Price of a second of one thread."""
    rewards: tuple[str, ...] = ()
    """Rewards that the function computes, as `TASK/REWARD`; empty: all."""


class RewardHost(RewardShell):
    """A reward worker; its factory path is `rollart.backends.rewards.host:RewardHost`."""

    def __init__(self, settings: Mapping[str, Any], wake: Callable[[], None]) -> None:
        chosen = RewardHostSettings.model_validate(dict(settings))
        super().__init__(RewardInfo(slots=chosen.slots, rewards=chosen.rewards), chosen.price, wake)
        self._slots = chosen.slots
        self._scorer = Scorer(chosen.function)
        self._threads = 0
        self._questions: queue.SimpleQueue[ScoreRequest | None] = queue.SimpleQueue()

    def close(self) -> None:
        """Threads that hang in the function are daemons and end with the process."""
        for _ in range(self._threads):
            self._questions.put(None)

    def _start(self, request: ScoreRequest) -> None:
        self._questions.put(request)
        if self._threads < min(self._pending, self._slots):
            self._threads += 1
            threading.Thread(target=self._run, name=f"reward:{self._threads}", daemon=True).start()

    def _run(self) -> None:
        with asyncio.Runner() as runner:
            while (question := self._questions.get()) is not None:
                began = time.monotonic()
                answer = self._scorer.answer(question, runner)
                self.finish(question, answer, RewardUse(replica_s=time.monotonic() - began))
