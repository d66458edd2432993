"""A seat: one thread for the environments of one slot, one after the other.

What holds: user code of an environment runs in its seat's thread and nowhere else, and whatever it raises becomes an
`EnvironmentFailed` here. A seat that is abandoned finishes what it hangs in (or never does), closes its environment
and ends; what it still has to say is void.
"""

import asyncio
import inspect
import logging
import math
import numbers
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rollart.backends.environments.codec import Codec
from rollart.ports.environment import AnyTextEnvironment, TextStep
from rollart.types.errors import WRONG_CODE
from rollart.types.ids import TrajectoryId
from rollart.types.messages import EnvironmentFailed, Observed, Reset, Step
from rollart.types.tokens import Segment
from rollart.types.trajectory import state_key

logger = logging.getLogger(__name__)

Answer = Observed | EnvironmentFailed
_CLOSE = "close"
_END = "end"


class Limits(NamedTuple):
    """The agent's own: reaching one ends the episode as truncated, which is the agent's result."""

    max_turns: int
    max_tokens: int | None


class Seat:
    """Owned by the host's thread, but for what `_run` calls."""

    def __init__(
        self,
        name: str,
        build: Callable[[Reset], AnyTextEnvironment],
        codec: Codec,
        limits: Limits,
        tell: Callable[["Seat", Answer], None],
    ) -> None:
        self._build = build
        self._codec = codec
        self._limits = limits
        self._tell = tell
        self._jobs: queue.SimpleQueue[Reset | Step | str] = queue.SimpleQueue()
        self._environment: AnyTextEnvironment | None = None
        self._loop: asyncio.Runner | None = None
        """Of the environment, if it is async."""
        self._tokens = 0
        self.episode: TrajectoryId | None = None
        """Whose seat it is."""
        self.waiting = False
        """The host has asked and not yet taken the answer."""
        self._given = 0
        self._finished = 0
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    @property
    def busy(self) -> bool:
        """The thread is in the environment's code, where it may hang."""
        return self._finished < self._given

    def ask(self, command: Reset | Step) -> None:
        self.waiting = True
        self._give(command)

    def leave(self) -> None:
        """The episode is over: close its environment."""
        self.episode = None
        self._give(_CLOSE)

    def end(self) -> None:
        """Close the environment and end the thread, as soon as it is free."""
        self.episode = None
        self._give(_END)

    def _give(self, job: Reset | Step | str) -> None:
        self._given += 1
        self._jobs.put(job)

    # --- in the seat's thread

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            if isinstance(job, str):
                self._close()
                self._finished += 1
                if job == _END:
                    return
                continue
            turn = job.turn if isinstance(job, Step) else 0
            answer: Answer
            try:
                answer = self._reset(job) if isinstance(job, Reset) else self._step(job)
            except BaseException as error:  # noqa: BLE001 - the boundary of the environment's code: its fault, attributed
                reason = f"{type(error).__name__}: {error}"
                answer = EnvironmentFailed(job.episode, turn, reason, wrong=isinstance(error, WRONG_CODE))
            if isinstance(answer, EnvironmentFailed):
                self._close()
            self._finished += 1
            self._tell(self, answer)

    def _reset(self, reset: Reset) -> Answer:
        self._close()
        self._tokens = 0
        self._environment = self._build(reset)
        return self._observed(reset.episode, 0, self._wait(self._environment.reset(reset.prompt)))

    def _step(self, step: Step) -> Answer:
        if self._environment is None:
            return EnvironmentFailed(step.episode, step.turn, "the environment failed before; reset it first")
        self._tokens += step.action.length
        action = step.action.ids().tolist()
        answer = self._wait(self._environment.step(self._codec.text(action)))
        return self._observed(step.episode, step.turn, answer, self._missing_end(action))

    def _missing_end(self, action: Sequence[int]) -> list[int]:
        """A turn that was cut off by a limit is ended in the context, so that the policy sees whole turns only."""
        ends = self._codec.stop_tokens
        return [] if action and action[-1] in ends else list(ends[:1])

    def _wait(self, answer: Any) -> Any:
        """What an environment answers, from its own event loop if it is a coroutine."""
        if not inspect.isawaitable(answer):
            return answer
        if self._loop is None:
            self._loop = asyncio.Runner()

        async def awaited() -> Any:
            return await answer

        return self._loop.run(awaited())

    def _observed(self, episode: TrajectoryId, turn: int, step: TextStep, before: Sequence[int] = ()) -> Answer:
        problem = _problem(step)
        if problem:
            return EnvironmentFailed(episode, turn, problem, wrong=True)
        first = turn == 0 or step.fresh_context
        observation = [*(() if first else before), *self._codec.render(step.observation, first)]
        self._tokens = len(observation) + (0 if first else self._tokens)
        over = turn >= self._limits.max_turns or (
            self._limits.max_tokens is not None and self._tokens >= self._limits.max_tokens
        )
        return Observed(
            episode=episode,
            turn=turn,
            observation=Segment.of(observation),
            reward=float(step.reward),
            done=bool(step.done or over),
            truncated=bool(step.truncated or (over and not step.done)),
            new_sequence=bool(step.fresh_context and turn > 0),
            artifact=step.artifact,
            state=state_key((step.state or step.observation).encode()),
        )

    def _close(self) -> None:
        environment, self._environment = self._environment, None
        if environment is None:
            return
        try:
            try:
                self._wait(environment.close())
            finally:
                self._end_loop()
        except BaseException as error:  # noqa: BLE001 - the episode is over; nobody can act on this but a reader
            logger.warning("an environment failed to close: %s: %s", type(error).__name__, error)

    def _end_loop(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.close()


def _problem(step: object) -> str:
    """Why this is no answer of an environment; empty if it is one."""
    if not isinstance(step, TextStep):
        return f"the environment answered with a {type(step).__name__}; it must be a TextStep"
    observation: object = step.observation
    reward: object = step.reward
    artifact: object = step.artifact
    state: object = step.state
    if not isinstance(observation, str):
        return f"the observation is a {type(observation).__name__}; it must be text"
    if isinstance(reward, bool) or not isinstance(reward, numbers.Real) or not math.isfinite(reward):
        return f"the reward is {reward!r}; it must be a finite number"
    if not isinstance(artifact, bytes):
        return f"the artifact is a {type(artifact).__name__}; it must be bytes"
    if not isinstance(state, str):
        return f"the state is a {type(state).__name__}; it must be text"
    return ""
