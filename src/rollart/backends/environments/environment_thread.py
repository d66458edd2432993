"""A thread that runs the environments of one slot, one after the other.

Invariants: an environment's user code runs only in its own thread, and anything it raises becomes an
`EnvironmentFailed` here. An abandoned thread finishes the call it hangs in (or never does), closes its environment and
ends; its answer is discarded.
"""

import asyncio
import inspect
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from rollart.backends.environments.checked import problem
from rollart.backends.environments.codec import Codec
from rollart.backends.environments.dialogue import Dialogue, open_dialogue
from rollart.backends.environments.interpreter import RemoteFailure
from rollart.backends.environments.recorder import Recorder
from rollart.ports.environment import AnyTextEnvironment, TextStep
from rollart.types.chat import readable
from rollart.types.errors import WRONG_CODE, RequestError
from rollart.types.ids import TrajectoryId
from rollart.types.messages import EnvironmentFailed, Observed, Reset, Step
from rollart.types.tokens import Segment
from rollart.types.trajectory import state_key

logger = logging.getLogger(__name__)

Answer = Observed | EnvironmentFailed
_CLOSE = "close"
_END = "end"


class EnvironmentThread:
    """Owned by the host's thread, except for what `_run` calls."""

    def __init__(
        self,
        name: str,
        build: Callable[[Reset], AnyTextEnvironment],
        codec: Codec,
        tell: Callable[["EnvironmentThread", Answer], None],
        recorder: Recorder | None = None,
    ) -> None:
        self._build = build
        self._codec = codec
        self._recorder = recorder
        """Makes a transcript of every episode; None if none is wanted."""
        self._seen = TextStep("")
        """The last observation, if there is a recorder."""
        self._tell = tell
        self._jobs: queue.SimpleQueue[Reset | Step | str] = queue.SimpleQueue()
        self._environment: AnyTextEnvironment | None = None
        self._loop: asyncio.Runner | None = None
        """Event loop of an async environment."""
        self._dialogue: Dialogue | None = None
        """Renders the messages of the episode; None if the environment speaks text."""
        self.episode: TrajectoryId | None = None
        """The current episode."""
        self.waiting = False
        """The host sent a command and has not received its answer yet."""
        self._given = 0
        self._finished = 0
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    @property
    def busy(self) -> bool:
        """Whether the thread is in the environment's code, where it may hang."""
        return self._finished < self._given

    def ask(self, command: Reset | Step) -> None:
        self.waiting = True
        self._give(command)

    def leave(self) -> None:
        """End the episode: close its environment."""
        self.episode = None
        self._abandon()
        self._give(_CLOSE)

    def end(self) -> None:
        """Close the environment and end the thread as soon as it is free."""
        self.episode = None
        self._abandon()
        self._give(_END)

    def _abandon(self) -> None:
        """Stop waiting for an environment in another process, which may hang; one in this process cannot be stopped."""
        abandon = getattr(self._environment, "abandon", None)
        if self.busy and abandon is not None:
            abandon()

    def _give(self, job: Reset | Step | str) -> None:
        self._given += 1
        self._jobs.put(job)

    # --- in the thread

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
            except RemoteFailure as error:
                answer = EnvironmentFailed(job.episode, turn, str(error), permanent=error.permanent)
            except BaseException as error:  # noqa: BLE001 - the boundary of user code: its errors are attributed to it
                reason = f"{type(error).__name__}: {error}"
                answer = EnvironmentFailed(
                    job.episode, turn, reason, permanent=isinstance(error, (*WRONG_CODE, RequestError))
                )
            if isinstance(answer, EnvironmentFailed):
                self._close()
            self._finished += 1
            self._tell(self, answer)

    def _reset(self, reset: Reset) -> Answer:
        self._close()
        self._dialogue = None
        self._environment = self._build(reset)
        if self._recorder is not None:
            self._recorder.reset(reset)
        return self._observed(reset.episode, 0, self._wait(self._environment.reset(reset.prompt)))

    def _step(self, step: Step) -> Answer:
        if self._environment is None:
            return EnvironmentFailed(step.episode, step.turn, "the environment has failed; reset it first")
        action = step.action.ids().tolist()
        text = self._codec.text(action)
        answer = self._wait(self._environment.step(text))
        if self._recorder is not None and not problem(answer):
            self._recorder.acted(self._seen, text, len(action), answer)
        return self._observed(step.episode, step.turn, answer, action)

    def _missing_end(self, action: Sequence[int]) -> list[int]:
        """End a turn that a limit cut off, so that the policy sees only complete turns in its context."""
        ends = self._codec.stop_tokens
        return [] if action and action[-1] in ends else list(ends[:1])

    def _wait(self, answer: Any) -> Any:
        """Result of a call; a coroutine runs in the environment's own event loop."""
        if not inspect.isawaitable(answer):
            return answer
        if self._loop is None:
            self._loop = asyncio.Runner()

        async def awaited() -> Any:
            return await answer

        return self._loop.run(awaited())

    def _observed(self, episode: TrajectoryId, turn: int, step: TextStep, action: Sequence[int] = ()) -> Answer:
        wrong = problem(step)
        if wrong:
            return EnvironmentFailed(episode, turn, wrong, permanent=True)
        observation, fresh = self._rendered(step, turn, action)
        transcript = b""
        if self._recorder is not None:
            step = step._replace(fresh_context=fresh)
            transcript = self._recorder.observed(step, len(observation))
            self._seen = step
        return Observed(
            episode=episode,
            turn=turn,
            observation=Segment.of(observation),
            reward=float(step.reward),
            done=bool(step.done),
            truncated=bool(step.truncated),
            new_sequence=bool(fresh and turn > 0),
            transcript=transcript,
            state=state_key((step.state or readable(step.observation)).encode()),
        )

    def _rendered(self, step: TextStep, turn: int, action: Sequence[int]) -> tuple[list[int], bool]:
        """Tokens of an observation, and whether they are a new context instead of following the old one."""
        fresh = bool(step.fresh_context)
        first = turn == 0 or fresh
        if first and not isinstance(step.observation, str):
            self._dialogue = open_dialogue(self._codec, step.tools)
        elif first:
            self._dialogue = None
        if self._dialogue is None:
            if isinstance(step.observation, str):
                before = () if first else self._missing_end(action)
                return [*before, *self._codec.render(step.observation, first)], fresh
            raise TypeError("messages followed text; let the first observation of an episode be messages too")
        if not first:
            self._dialogue.acted(action)
        text = step.observation
        messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
        tokens, rewritten = self._dialogue.observe(messages)
        return tokens, fresh or rewritten

    def _close(self) -> None:
        environment, self._environment = self._environment, None
        if environment is None:
            return
        try:
            try:
                self._wait(environment.close())
            finally:
                self._end_loop()
        except BaseException as error:  # noqa: BLE001 - the episode is over; only a reader of the log can act on this
            logger.warning("an environment failed to close: %s: %s", type(error).__name__, error)

    def _end_loop(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.close()
