"""Evaluation rounds: held-out episodes through the same control plane, beside training.

Every round plays the same held-out prompts, each as often as configured. Its episodes start before new training work.
During training they occupy at most a quarter of a task's environments, so that they do not stall a batch; before the
first step, and when the loop waits for them, they may use all. A failed episode is not a score of 0: it is left out of
the mean and counted.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from rollart.control.context import Context
from rollart.policy.liveness import EVAL_ATTEMPTS, episode_bound_s, eval_concurrency
from rollart.policy.passes import passes
from rollart.ports.prompts import PromptSource
from rollart.types.errors import RunError
from rollart.types.ids import PromptId
from rollart.types.journal import EvalEnded
from rollart.types.trajectory import Ticket, Trajectory


@dataclass(slots=True)
class _Round:
    step: int
    waiting: deque[Ticket]
    episodes: int
    at_once: int
    samples: int
    running: int = 0
    rewards: dict[PromptId, list[float]] = field(default_factory=dict)
    """By prompt: those of its attempts."""
    failed: int = 0

    @property
    def over(self) -> bool:
        return not self.waiting and not self.running


class Evaluation:
    """At most one round per task at a time; a round that is due while another runs is skipped."""

    def __init__(
        self, context: Context, prompts: Mapping[str, PromptSource], episodes_waiting: Callable[[], None]
    ) -> None:
        self._context = context
        self._prompts = prompts
        self._start = {task: source.cursor() for task, source in prompts.items()}
        self._rounds: dict[str, _Round] = {}
        self._done: asyncio.Future[None] | None = None
        self._episodes_waiting = episodes_waiting
        """Called when more episodes may start."""

    def open(self, step: int) -> None:
        """Start a round for every task that has held-out episodes."""
        config = self._context.config
        for task, settings in config.tasks.items():
            if settings.eval_episodes and task not in self._rounds:
                source = self._prompts[task]
                source.seek(self._start[task])
                tickets = deque(_tickets(source, settings.eval_episodes, settings.eval_samples))
                at_once = eval_concurrency(config, task, alone=False)
                self._rounds[task] = _Round(step, tickets, len(tickets), at_once, settings.eval_samples)
        self._episodes_waiting()

    def use_all_environments(self) -> None:
        """Let open rounds use all environments, because the loop waits for them."""
        for task, round in self._rounds.items():
            round.at_once = eval_concurrency(self._context.config, task, alone=True)
        self._episodes_waiting()

    def next(self, task: str) -> Ticket | None:
        """Next episode to start; None if none is queued or the concurrency limit is reached."""
        round = self._rounds.get(task)
        if round is None or not round.waiting or round.running >= round.at_once:
            return None
        round.running += 1
        return round.waiting.popleft()

    def scored(self, trajectory: Trajectory) -> None:
        round = self._rounds[trajectory.task]
        if trajectory.reward is not None:
            round.rewards.setdefault(trajectory.prompt.id, []).append(trajectory.reward)
        self._ended(trajectory.task, round)

    def failed(self, task: str) -> None:
        round = self._rounds.get(task)
        if round is not None:
            round.failed += 1
            self._ended(task, round)

    async def finished(self) -> None:
        """Return once no round is open. Episodes have their own deadlines; this one is a last resort."""
        self.use_all_environments()
        config = self._context.config
        limit_s = EVAL_ATTEMPTS * max(episode_bound_s(config, task) for task in config.tasks)
        while self._rounds:
            self._done = self._context.loop.create_future()
            await self._context.waits.wait(
                self._done, "evaluation", "held-out episodes", limit_s, "the run stops", RunError
            )

    def _ended(self, task: str, round: _Round) -> None:
        round.running -= 1
        if round.over:
            del self._rounds[task]
            rewards = [reward for attempts in round.rewards.values() for reward in attempts]
            mean = math.fsum(rewards) / len(rewards) if rewards else None
            pass_at: dict[str, float] = {}
            if round.samples > 1:
                pass_at = passes(round.rewards, round.samples, self._context.config.tasks[task].pass_reward)
            now, episodes = self._context.now(), round.episodes
            self._context.record(EvalEnded(now, task, round.step, episodes, len(rewards), mean, round.samples, pass_at))
        if self._done is not None and not self._done.done():
            self._done.set_result(None)


def _tickets(source: PromptSource, prompts: int, samples: int) -> Iterator[Ticket]:
    """Tickets for all attempts at the next prompts; fewer if the source has fewer distinct prompts."""
    seen: dict[PromptId, None] = {}
    while len(seen) < prompts:
        prompt = source.next()
        if prompt.id in seen:
            return
        seen[prompt.id] = None
        # The member number makes each attempt a sample of its own.
        yield from (Ticket(-1, prompt, next_member=number) for number in range(samples))
