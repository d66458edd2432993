"""Environments and rewards that break one promise each."""

import math

from doubles.bent import Bent, replace
from rollart.ports.worker import Advance, Worker
from rollart.types.messages import EnvironmentFailed, Observed, Scored, ScoreFailed, Step, WorkerCommand, WorkerEvent
from rollart.types.tokens import Segment


class RestartsBlank(Bent):
    """A step of an episode that is not there is answered as if it were."""

    def event(self, event: WorkerEvent) -> list[WorkerEvent]:
        if isinstance(event, EnvironmentFailed) and event.turn > 0:
            return [Observed(event.episode, event.turn, Segment(1, None))]
        return [event]


class FailsWithReward(Bent):
    """A failure of the environment is a reward of 0 for the agent."""

    def event(self, event: WorkerEvent) -> list[WorkerEvent]:
        if isinstance(event, EnvironmentFailed):
            return [Observed(event.episode, event.turn, Segment(0, None), reward=0.0, done=True)]
        return [event]


class ActsTwice(Bent):
    """A step that is asked for again is acted again: the answer is another one."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self._counts: dict[tuple[int, int], int] = {}

    def event(self, event: WorkerEvent) -> list[WorkerEvent]:
        if isinstance(event, Observed) and event.turn > 0:
            times = self._counts[event.episode, event.turn] = self._counts.get((event.episode, event.turn), 0) + 1
            return [replace(event, reward=event.reward + times - 1)]
        return [event]


class SwallowsUnknown(Bent):
    """Steps of episodes that were never reset get no answer."""

    def event(self, event: WorkerEvent) -> list[WorkerEvent]:
        return [] if isinstance(event, EnvironmentFailed) and event.turn == 3 else [event]

    def command(self, command: WorkerCommand) -> list[WorkerCommand]:
        return [] if isinstance(command, Step) and command.turn == 3 and command.episode == 7 else [command]


class TranscribesEarly(Bent):
    """Every observation comes with what could be a transcript."""

    def event(self, event: WorkerEvent) -> list[WorkerEvent]:
        return [replace(event, transcript=b"x")] if isinstance(event, Observed) else [event]


class ZeroForFailure(Bent):
    """A failed reward becomes 0."""

    def event(self, event: WorkerEvent) -> list[WorkerEvent]:
        return [Scored(event.key, (0.0,))] if isinstance(event, ScoreFailed) else [event]


class PassesNan(Bent):
    """What the function answers is passed on as it is."""

    def event(self, event: WorkerEvent) -> list[WorkerEvent]:
        return [Scored(event.key, (math.nan,))] if isinstance(event, ScoreFailed) and not event.retry else [event]


class CountsAgain(Bent):
    """A question that is asked again has another answer."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self._counts: dict[str, int] = {}

    def event(self, event: WorkerEvent) -> list[WorkerEvent]:
        if isinstance(event, Scored):
            self._counts[event.key] = self._counts.get(event.key, 0) + 1
            return [replace(event, values=tuple(value * self._counts[event.key] for value in event.values))]
        return [event]


class LosesMembers(Bent):
    """A group gets the value of its best member only."""

    def event(self, event: WorkerEvent) -> list[WorkerEvent]:
        return [replace(event, values=(max(event.values),))] if isinstance(event, Scored) else [event]


class SortsMembers(Bent):
    """The values of a group come in an order of their own."""

    def event(self, event: WorkerEvent) -> list[WorkerEvent]:
        return [replace(event, values=tuple(sorted(event.values)))] if isinstance(event, Scored) else [event]


class HalfOfTheParts(Bent):
    """A part is lost on the way."""

    def event(self, event: WorkerEvent) -> list[WorkerEvent]:
        if isinstance(event, Scored):
            return [replace(event, parts=tuple(dict(list(parts.items())[:1]) for parts in event.parts))]
        return [event]


class OneByOne(Bent):
    """Breaks nothing: it gives one event per slice, so that answers are known long before they are reported."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self._held: list[WorkerEvent] = []

    def advance(self, now: float) -> Advance:
        advance = super().advance(now)
        self._held += advance.events
        events, self._held = self._held[:1], self._held[1:]
        return Advance(events, now if self._held else advance.wake_at)
