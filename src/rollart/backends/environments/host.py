"""The environment host: a worker with some slots, each with one environment in a thread of its own.

What holds: a (episode, turn) is executed at most once, and asking again gives the same answer; an environment that
hangs or raises holds up its own episode only; a slot is free for the next `Reset` whatever the last episode does.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import Field

from rollart.backends.environments.codec import Codec
from rollart.backends.environments.gym import adapted
from rollart.backends.environments.inject import Injected
from rollart.backends.environments.seat import Answer, Limits, Seat
from rollart.config.base import Strict
from rollart.config.injection import Injections
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
"""Of so many episodes that are over, doubled commands are answered from memory."""
CLOSE_TIMEOUT_S = 1.0


class EnvironmentHostSettings(Strict):
    task: str
    environment: str
    """Factory path of a `TextEnvironment`, or of an environment in Gymnasium's form; called with
    `environment_settings` as keywords, once per episode."""
    environment_settings: dict[str, Any] = Field(default_factory=dict)
    codec: str = "rollart.backends.environments.codec:ByteCodec"
    """Factory path of a `Codec`; called with `codec_settings` as keywords."""
    codec_settings: dict[str, Any] = Field(default_factory=dict)
    slots: int = Field(default=8, ge=1)
    max_turns: int = Field(default=16, ge=1)
    max_tokens: int | None = Field(default=None, ge=1)
    """Of a whole episode, observations and actions; None: no limit here."""
    inject: Injections = ()
    """Trouble on purpose."""


class _Episode:
    """What is remembered of an episode. `seat` is None once it is over."""

    def __init__(self, seat: Seat | None) -> None:
        self.seat = seat
        self.asked = 0
        self.answers: dict[int, Answer] = {}

    @property
    def over(self) -> bool:
        last = self.answers.get(self.asked)
        return self.seat is None or isinstance(last, EnvironmentFailed) or (isinstance(last, Observed) and last.done)


class EnvironmentHost:
    """An environment worker; its factory path is `rollart.backends.environments.host:EnvironmentHost`."""

    def __init__(self, settings: Mapping[str, Any], wake: Callable[[], None]) -> None:
        self._settings = EnvironmentHostSettings.model_validate(dict(settings))
        self._wake = wake
        self._factory = load(self._settings.environment)
        self._codec: Codec = load(self._settings.codec)(**self._settings.codec_settings)
        self._limits = Limits(self._settings.max_turns, self._settings.max_tokens)
        self._seats: dict[int, Seat] = {}
        self._episodes: dict[TrajectoryId, _Episode] = {}
        self._over: deque[TrajectoryId] = deque()
        self._commands: deque[WorkerCommand] = deque()
        self._answers: deque[tuple[Seat, Answer]] = deque()
        """Filled by the seats' threads; a deque's ends may be used from several threads."""

    def info(self) -> EnvironmentInfo:
        return EnvironmentInfo(task=self._settings.task, slots=self._settings.slots)

    def post(self, commands: Sequence[WorkerCommand]) -> None:
        self._commands.extend(commands)

    def advance(self, now: float) -> Advance:  # noqa: ARG002 - what happens here happens in threads, not in time
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
                    raise InvariantBroken(f"an environment does not take {type(other).__name__}; a bug of rollart")
        return Advance(events, None)

    def close(self) -> None:
        for seat in self._seats.values():
            seat.end()
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for slot, seat in self._seats.items():
            seat.thread.join(max(0.0, deadline - time.monotonic()))
            if seat.thread.is_alive():
                logger.warning("%s: the environment in slot %d hangs and is abandoned", self._settings.task, slot)
        self._seats.clear()

    def _collect(self, events: list[WorkerEvent]) -> None:
        while self._answers:
            seat, answer = self._answers.popleft()
            episode = self._episodes.get(answer.episode)
            if episode is None or episode.seat is not seat:
                continue  # given up in the meantime
            seat.waiting = False
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
        seat = self._free_seat(reset.slot)
        seat.episode = reset.episode
        self._episodes[reset.episode] = _Episode(seat)
        seat.ask(reset)

    def _free_seat(self, slot: int) -> Seat:
        """A seat whose thread is free: that of the slot, or a fresh one if it is busy, be it with closing."""
        seat = self._seats.get(slot)
        if seat is not None and seat.episode is not None:
            self._leave(seat.episode)
        if seat is not None and not seat.busy:
            return seat
        if seat is not None:
            seat.end()
        fresh = Seat(f"{self._settings.task}:{slot}", self._build, self._codec, self._limits, self._tell)
        self._seats[slot] = fresh
        return fresh

    def _step(self, step: Step, events: list[WorkerEvent]) -> None:
        episode = self._episodes.get(step.episode)
        if episode is None:
            reason = "this worker does not know the episode; reset it first"
            events.append(EnvironmentFailed(step.episode, step.turn, reason))
        elif step.turn <= episode.asked:
            _again(episode, step.turn, events)
        elif episode.seat is None or episode.over or episode.seat.waiting or step.turn != episode.asked + 1:
            reason = f"turn {step.turn} cannot follow turn {episode.asked}, which is open or ended the episode"
            events.append(EnvironmentFailed(step.episode, step.turn, reason))
        else:
            episode.asked = step.turn
            episode.seat.ask(step)

    def _leave(self, id: TrajectoryId) -> None:
        """The episode is over or given up; whatever its environment still answers is void."""
        episode = self._episodes.get(id)
        if episode is None or episode.seat is None:
            return
        seat, episode.seat = episode.seat, None
        if seat.busy:
            logger.debug("%s: episode %d was closed while its environment worked", seat.thread.name, id)
        seat.waiting = False
        seat.leave()
        self._over.append(id)
        if len(self._over) > REMEMBERED_EPISODES:
            del self._episodes[self._over.popleft()]

    def _build(self, reset: Reset) -> AnyTextEnvironment:
        environment: AnyTextEnvironment = adapted(self._factory(**self._settings.environment_settings))
        for number, injection in enumerate(self._settings.inject):
            environment = Injected(environment, injection, reset, number)
        return environment

    def _tell(self, seat: Seat, answer: Answer) -> None:
        self._answers.append((seat, answer))
        self._wake()


def _again(episode: _Episode, turn: int, events: list[WorkerEvent]) -> None:
    """Answer a double; one that is still under way gets its answer when it is there."""
    answer = episode.answers.get(turn)
    if answer is not None:
        events.append(answer)
