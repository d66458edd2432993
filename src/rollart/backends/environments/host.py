"""Environment host: a worker with several slots, each running one environment in its own thread.

Invariants: an (episode, turn) is executed at most once, and a repeated command gets the same answer; an environment
that hangs or raises affects only its own episode; a slot accepts the next `Reset` whatever the last episode does. The
controller enforces the limits of an episode (turns, tokens).
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import Field

from rollart.backends.environments.codec import Codec
from rollart.backends.environments.environment_thread import Answer, EnvironmentThread
from rollart.backends.environments.inject import Injected
from rollart.backends.environments.recorder import Recorder
from rollart.backends.environments.sources import open_source
from rollart.config.base import Strict
from rollart.config.tasks import TaskSettings
from rollart.ports.environment import AnyTextEnvironment
from rollart.ports.factory import load
from rollart.ports.worker import Advance
from rollart.types.errors import InvariantBroken
from rollart.types.ids import TrajectoryId
from rollart.types.messages import (
    Close,
    EnvironmentFailed,
    EnvironmentInfo,
    Observed,
    Reset,
    Step,
    WorkerCommand,
    WorkerEvent,
)

logger = logging.getLogger(__name__)

REMEMBERED_EPISODES = 256
"""Number of finished episodes kept for de-duplication of commands."""
CLOSE_TIMEOUT_S = 1.0


class EnvironmentHostSettings(Strict):
    """What an environment worker is started with: the settings of its task, and its part of the environments."""

    task: str
    settings: TaskSettings
    """`environment` is called with `environment_settings` as keywords, once per episode; without one, rows are shown
    and answered (`chat`)."""
    codec: str = "rollart.backends.environments.codec:ByteCodec"
    """Factory path of a `Codec`; called with `codec_settings` as keywords."""
    codec_settings: dict[str, Any] = Field(default_factory=dict)
    slots: int = Field(default=8, ge=1)
    transcripts: bool = False
    """Whether the last observation of an episode comes with its transcript."""


class _Episode:
    """State kept for an episode. `runner` is None once it is over."""

    def __init__(self, runner: EnvironmentThread | None) -> None:
        self.runner = runner
        self.asked = 0
        self.answers: dict[int, Answer] = {}

    @property
    def over(self) -> bool:
        last = self.answers.get(self.asked)
        return self.runner is None or isinstance(last, EnvironmentFailed) or (isinstance(last, Observed) and last.done)


class EnvironmentHost:
    """An environment worker; its factory path is `rollart.backends.environments.host:EnvironmentHost`."""

    def __init__(self, settings: Mapping[str, Any], wake: Callable[[], None]) -> None:
        self._settings = EnvironmentHostSettings.model_validate(dict(settings))
        self._wake = wake
        task = self._settings
        self._codec: Codec = load(task.codec)(**task.codec_settings)
        self.source = open_source(task.task, task.settings, task.slots, self._codec)
        self._threads: dict[int, EnvironmentThread] = {}
        self._episodes: dict[TrajectoryId, _Episode] = {}
        self._over: deque[TrajectoryId] = deque()
        self._commands: deque[WorkerCommand] = deque()
        self._answers: deque[tuple[EnvironmentThread, Answer]] = deque()
        """Appended to by the environment threads; deque operations are thread-safe."""

    def info(self) -> EnvironmentInfo:
        return EnvironmentInfo(task=self._settings.task, slots=self._settings.slots)

    def post(self, commands: Sequence[WorkerCommand]) -> None:
        self._commands.extend(commands)

    def advance(self, now: float) -> Advance:  # noqa: ARG002 - driven by threads, not by time
        events: list[WorkerEvent] = []
        self._collect(events)
        while self._commands:
            match self._commands.popleft():
                case Reset() as reset:
                    self._reset(reset, events)
                case Step() as step:
                    self._step(step, events)
                case Close(episode):
                    self._leave(episode)
                case other:
                    raise InvariantBroken(f"an environment does not accept {type(other).__name__}; a bug in rollart")
        return Advance(events, None)

    def close(self) -> None:
        for runner in self._threads.values():
            runner.end()
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for slot, runner in self._threads.items():
            runner.thread.join(max(0.0, deadline - time.monotonic()))
            if runner.thread.is_alive():
                logger.warning("%s: abandoning the environment in slot %d, which hangs", self._settings.task, slot)
        self._threads.clear()
        self.source.close()

    def _collect(self, events: list[WorkerEvent]) -> None:
        while self._answers:
            runner, answer = self._answers.popleft()
            episode = self._episodes.get(answer.episode)
            if episode is None or episode.runner is not runner:
                continue  # abandoned in the meantime
            runner.waiting = False
            episode.answers[answer.turn] = answer
            events.append(answer)

    def _reset(self, reset: Reset, events: list[WorkerEvent]) -> None:
        known = self._episodes.get(reset.episode)
        if known is not None:
            _again(known, 0, events)
            return
        if not 0 <= reset.slot < self._settings.slots:
            reason = f"slot {reset.slot} does not exist; this worker has {self._settings.slots}"
            events.append(EnvironmentFailed(reset.episode, 0, reason))
            return
        runner = self._free_thread(reset.slot)
        runner.episode = reset.episode
        self._episodes[reset.episode] = _Episode(runner)
        runner.ask(reset)

    def _free_thread(self, slot: int) -> EnvironmentThread:
        """The slot's thread if it is free; a new one if it is busy, even with closing."""
        runner = self._threads.get(slot)
        if runner is not None and runner.episode is not None:
            self._leave(runner.episode)
        if runner is not None and not runner.busy:
            return runner
        if runner is not None:
            runner.end()
        task = self._settings.task
        recorder = Recorder(task, self._settings.settings) if self._settings.transcripts else None
        fresh = EnvironmentThread(f"{task}:{slot}", self._build, self._codec, self._tell, recorder)
        self._threads[slot] = fresh
        return fresh

    def _step(self, step: Step, events: list[WorkerEvent]) -> None:
        episode = self._episodes.get(step.episode)
        if episode is None:
            reason = "unknown episode on this worker; reset it first"
            events.append(EnvironmentFailed(step.episode, step.turn, reason))
        elif step.turn <= episode.asked:
            _again(episode, step.turn, events)
        elif episode.runner is None or episode.over or episode.runner.waiting or step.turn != episode.asked + 1:
            reason = f"turn {step.turn} cannot follow turn {episode.asked}, which is pending or ended the episode"
            events.append(EnvironmentFailed(step.episode, step.turn, reason))
        else:
            episode.asked = step.turn
            episode.runner.ask(step)

    def _leave(self, id: TrajectoryId) -> None:
        """End or abandon an episode; any later answer of its environment is discarded."""
        episode = self._episodes.get(id)
        if episode is None or episode.runner is None:
            return
        runner, episode.runner = episode.runner, None
        if runner.busy:
            logger.debug("%s: episode %d was closed while its environment was busy", runner.thread.name, id)
        runner.waiting = False
        runner.leave()
        self._over.append(id)
        if len(self._over) > REMEMBERED_EPISODES:
            del self._episodes[self._over.popleft()]

    def _build(self, reset: Reset) -> AnyTextEnvironment:
        task = self._settings.settings
        environment = self.source.build()
        for number, injection in enumerate(task.inject):
            environment = Injected(environment, injection, reset, number)
        return environment

    def _tell(self, runner: EnvironmentThread, answer: Answer) -> None:
        self._answers.append((runner, answer))
        self._wake()


def _again(episode: _Episode, turn: int, events: list[WorkerEvent]) -> None:
    """Repeat an answer; a duplicate of a pending command is answered along with it."""
    answer = episode.answers.get(turn)
    if answer is not None:
        events.append(answer)
