"""Simulated environments: one worker that hosts many slots of one task and answers after drawn latencies.

Every `Reset` and `Step` of an open episode is answered once by `Observed` or `EnvironmentFailed`, and again when it is
asked again. What the answer is depends on the prompt, the member and the turn (`workload`), never on who else is there.
"""

import heapq
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollart.ports.worker import Advance
from rollart.sim.workload import Episode, Workload
from rollart.types.errors import InvariantBroken
from rollart.types.ids import TrajectoryId
from rollart.types.messages import (
    Close,
    EnvironmentEvent,
    EnvironmentFailed,
    EnvironmentInfo,
    Observed,
    Reset,
    Step,
    WorkerCommand,
    WorkerEvent,
)
from rollart.types.tokens import Segment

_NO_TOKENS = Segment(0, None)


class _Open:
    """An episode in a slot. `turn` is the last one asked for; `answer` is None while that is on its way."""

    __slots__ = ("answer", "closed", "id", "script", "slot", "turn")

    def __init__(self, id: TrajectoryId, slot: int, script: Episode) -> None:
        self.id = id
        self.slot = slot
        self.script = script
        self.turn = 0
        self.answer: EnvironmentEvent | None = None
        self.closed = False


class SimEnvironments:
    """The environments of one task. Settings:

    task: str    profile: TaskProfile    slots: int    seed: int
    """

    __slots__ = (
        "_asked",
        "_commands",
        "_due",
        "_episodes",
        "_in_slot",
        "_slots",
        "_task",
        "_workload",
    )

    def __init__(self, settings: Mapping[str, Any], _wake: Callable[[], None]) -> None:
        self._task: str = settings["task"]
        self._slots: int = settings["slots"]
        self._workload = Workload(self._task, settings["profile"], settings["seed"])
        self._episodes: dict[TrajectoryId, _Open] = {}
        self._in_slot: dict[int, _Open] = {}
        self._due: list[tuple[float, int, _Open]] = []
        self._asked = 0
        self._commands: list[WorkerCommand] = []

    def info(self) -> EnvironmentInfo:
        return EnvironmentInfo(task=self._task, slots=self._slots)

    def post(self, commands: Sequence[WorkerCommand]) -> None:
        self._commands.extend(commands)

    def advance(self, now: float) -> Advance:
        events: list[WorkerEvent] = []
        # Answers that are due were given before the commands of this moment arrived.
        self._give(now, events)
        if self._commands:
            commands, self._commands = self._commands, []
            for command in commands:
                if isinstance(command, Step):
                    self._step(command, now, events)
                elif isinstance(command, Reset):
                    self._reset(command, now, events)
                elif isinstance(command, Close):
                    self._close(command.episode)
                else:
                    raise InvariantBroken(f"an environment worker does not take {type(command).__name__}")
            self._give(now, events)
        return Advance(events, self._due[0][0] if self._due else None)

    def close(self) -> None:
        self._commands.clear()
        self._due.clear()

    def _reset(self, reset: Reset, now: float, events: list[WorkerEvent]) -> None:
        known = self._episodes.get(reset.episode)
        if known is not None:
            self._again(known, 0, events)
            return
        if not 0 <= reset.slot < self._slots:
            reason = f"slot {reset.slot} is not one of the {self._slots} here"
            events.append(EnvironmentFailed(reset.episode, 0, reason))
            return
        before = self._in_slot.get(reset.slot)
        if before is not None:
            self._close(before.id)
        script = self._workload.episode(reset.prompt.seed, reset.member)
        episode = _Open(reset.episode, reset.slot, script)
        self._episodes[reset.episode] = self._in_slot[reset.slot] = episode
        self._answer_at(now + script.reset_s(), episode)

    def _step(self, step: Step, now: float, events: list[WorkerEvent]) -> None:
        id, turn = step.episode, step.turn
        episode = self._episodes.get(id)
        if episode is None:
            events.append(EnvironmentFailed(id, turn, "the episode is not open here: never reset, or closed"))
            return
        if turn <= episode.turn:
            self._again(episode, turn, events)
            return
        last = episode.answer
        if turn != episode.turn + 1 or not isinstance(last, Observed) or last.done:
            events.append(EnvironmentFailed(id, turn, f"turn {turn} does not follow turn {episode.turn} as it went"))
            return
        episode.turn = turn
        episode.answer = None
        self._answer_at(now + episode.script.step_s(turn), episode)

    def _again(self, episode: _Open, turn: int, events: list[WorkerEvent]) -> None:
        """A repeated question: the last answer is given again; one on its way, and older turns, need none."""
        if turn == episode.turn and episode.answer is not None:
            events.append(episode.answer)

    def _close(self, id: TrajectoryId) -> None:
        episode = self._episodes.pop(id, None)
        if episode is not None:
            episode.closed = True
            del self._in_slot[episode.slot]

    def _answer_at(self, at: float, episode: _Open) -> None:
        self._asked += 1
        heapq.heappush(self._due, (at, self._asked, episode))

    def _give(self, now: float, events: list[WorkerEvent]) -> None:
        due = self._due
        # Closed episodes are dropped at the top, whatever their time, so that nobody is woken for them.
        while due and (due[0][0] <= now or due[0][2].closed):
            episode = heapq.heappop(due)[2]
            if not episode.closed:
                episode.answer = answer = _answer(episode)
                events.append(answer)


def _answer(episode: _Open) -> EnvironmentEvent:
    """To what the episode was asked last; made when it is due, because so many are on their way at once."""
    script, id, turn = episode.script, episode.id, episode.turn
    if not turn:
        if script.reset_fails():
            return EnvironmentFailed(id, 0, "the simulated environment could not be reset")
        return Observed(id, 0, Segment(script.prompt_tokens(), None))
    if script.step_fails(turn):
        return EnvironmentFailed(id, turn, "the simulated environment failed in a step")
    if turn >= script.turns:
        return Observed(id, turn, _NO_TOKENS, reward=script.reward(), done=True)
    return Observed(id, turn, Segment(script.observation_tokens(turn), None))
