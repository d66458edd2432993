"""Simulated environments: one worker with many slots of one task, answering after drawn latencies.

Every `Reset` and `Step` of an open episode is answered once by `Observed` or `EnvironmentFailed`, and again if
repeated. The answer depends only on the prompt, the member and the turn (`workload`), never on other episodes.
"""

from array import array
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollart.ports.worker import Advance
from rollart.sim.workload import Episode, Workload, shared_workload
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


class _Open(Episode):
    """An episode in a slot. `turn` is the last one requested; `answered` is False while its answer is pending.

    `over`: the last answer was the end, or a failure; there is no next turn.
    """

    __slots__ = ("answered", "closed", "id", "over", "slot", "turn")

    def __init__(self, workload: Workload, reset: Reset) -> None:
        super().__init__(workload, reset.prompt.seed, reset.member)
        self.id = reset.episode
        self.slot = reset.slot
        self.turn = 0
        self.answered = False
        self.over = False
        self.closed = False

    def answer(self) -> EnvironmentEvent:
        """Answer to the last request. Deterministic, so it is computed when due, and again if repeated."""
        id, turn = self.id, self.turn
        if not turn:
            if self.reset_fails():
                return EnvironmentFailed(id, 0, "the simulated environment could not be reset")
            return Observed(id, 0, Segment(self.prompt_tokens(), None))
        if self.step_fails(turn):
            return EnvironmentFailed(id, turn, "the simulated environment failed in a step")
        if turn >= self.turns:
            return Observed(id, turn, _NO_TOKENS, reward=self.reward(), done=True)
        return Observed(id, turn, Segment(self.observation_tokens(turn), None))


class SimEnvironments:
    """The environments of one task. Settings:

    task: str    profile: TaskProfile    slots: int    seed: int
    """

    __slots__ = (
        "_commands",
        "_due",
        "_due_at",
        "_episodes",
        "_in_slot",
        "_slots",
        "_task",
        "_workload",
    )

    def __init__(self, settings: Mapping[str, Any], _wake: Callable[[], None]) -> None:
        self._task: str = settings["task"]
        self._slots: int = settings["slots"]
        self._workload = shared_workload(self._task, settings["profile"], settings["seed"])
        self._episodes: dict[TrajectoryId, _Open] = {}
        self._in_slot: dict[int, _Open] = {}
        self._due: list[_Open] = []
        """Episodes with pending answers, the next one last."""
        self._due_at = array("d")
        """Negated times of the pending answers, hence ascending."""
        self._commands: list[WorkerCommand] = []

    def info(self) -> EnvironmentInfo:
        return EnvironmentInfo(task=self._task, slots=self._slots)

    def post(self, commands: Sequence[WorkerCommand]) -> None:
        self._commands.extend(commands)

    def advance(self, now: float) -> Advance:
        events: list[WorkerEvent] = []
        # Answers that are due precede the commands that arrived at this moment.
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
                    raise InvariantBroken(f"an environment worker does not accept {type(command).__name__}")
            self._give(now, events)
        return Advance(events, -self._due_at[-1] if self._due_at else None)

    def close(self) -> None:
        self._commands.clear()
        self._due.clear()
        del self._due_at[:]

    def _reset(self, reset: Reset, now: float, events: list[WorkerEvent]) -> None:
        known = self._episodes.get(reset.episode)
        if known is not None:
            self._again(known, 0, events)
            return
        if not 0 <= reset.slot < self._slots:
            reason = f"slot {reset.slot} does not exist; this worker has {self._slots}"
            events.append(EnvironmentFailed(reset.episode, 0, reason))
            return
        before = self._in_slot.get(reset.slot)
        if before is not None:
            self._close(before.id)
        episode = _Open(self._workload, reset)
        self._episodes[reset.episode] = self._in_slot[reset.slot] = episode
        self._answer_at(now + episode.reset_s(), episode)

    def _step(self, step: Step, now: float, events: list[WorkerEvent]) -> None:
        id, turn = step.episode, step.turn
        episode = self._episodes.get(id)
        if episode is None:
            events.append(EnvironmentFailed(id, turn, "the episode is not open here: never reset, or closed"))
            return
        if turn <= episode.turn:
            self._again(episode, turn, events)
            return
        if turn != episode.turn + 1 or not episode.answered or episode.over:
            reason = f"turn {turn} cannot follow turn {episode.turn}, which is pending or ended the episode"
            events.append(EnvironmentFailed(id, turn, reason))
            return
        episode.turn = turn
        episode.answered = False
        self._answer_at(now + episode.step_s(turn), episode)

    def _again(self, episode: _Open, turn: int, events: list[WorkerEvent]) -> None:
        """Handle a repeated request: repeat the last answer; pending and older turns need none."""
        if turn == episode.turn and episode.answered:
            events.append(episode.answer())

    def _close(self, id: TrajectoryId) -> None:
        episode = self._episodes.pop(id, None)
        if episode is not None:
            episode.closed = True
            del self._in_slot[episode.slot]

    def _answer_at(self, at: float, episode: _Open) -> None:
        place = bisect_left(self._due_at, -at)  # among equal times, the one requested first is answered first
        self._due_at.insert(place, -at)
        self._due.insert(place, episode)

    def _give(self, now: float, events: list[WorkerEvent]) -> None:
        due, due_at = self._due, self._due_at
        # Closed episodes at the end are dropped before their time, so that they cause no wake-up.
        while due and (-due_at[-1] <= now or due[-1].closed):
            due_at.pop()
            episode = due.pop()
            if not episode.closed:
                answer = episode.answer()
                episode.answered = True
                episode.over = not isinstance(answer, Observed) or answer.done
                events.append(answer)
