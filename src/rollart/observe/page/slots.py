"""Environment slots: which were slow, which failed, for how long, and what was done about it.

The journal records the start of an episode, the request of its first turn, and the end of every turn. Hence the
duration of a reset is known (including a wait for an engine), and that of a step which never returned; any other step
is only known together with the following turn.
"""

import msgspec

from rollart.types import journal as j
from rollart.types.failures import FailureKind
from rollart.types.ids import GroupId, TrajectoryId
from rollart.types.trajectory import FAILURES, Outcome

MOST_FAILURES = 200
MOST_SLOTS = 20
RESET, TURN, STEP = "reset", "turn", "step"
"""What an open episode waits for, as far as the journal shows."""


class Failure(msgspec.Struct, kw_only=True):
    """A trajectory that ended for a reason outside its agent."""

    at: float
    since: float
    """Time of its previous event."""
    task: str
    trajectory: int
    part: str
    """The environment slot; or the engine or the reward, if that failed instead."""
    outcome: str
    what: str
    hung: bool
    cause: str
    done: str = ""
    """Action taken."""


class Slot(msgspec.Struct, kw_only=True):
    """Statistics of one environment slot."""

    name: str
    task: str
    episodes: int = 0
    resets: int = 0
    reset_s: float = 0.0
    rounds: int = 0
    round_s: float = 0.0
    """From the end of a turn to the end of the next one."""
    failures: int = 0
    longest_s: float = 0.0
    longest_at: float = 0.0
    longest: str = ""
    """Operation that took longest."""


class _Open(msgspec.Struct):
    slot: Slot
    since: float
    stage: str
    engine: str = ""


class SlotFold:
    """Consumes a journal event by event; `at` is the time since the run began."""

    def __init__(self) -> None:
        self.slots: dict[str, Slot] = {}
        self.failures: list[Failure] = []
        self.failed = 0
        """Total count, including failures that are not listed."""
        self._tasks: dict[GroupId, str] = {}
        self._open: dict[TrajectoryId, _Open] = {}
        self._broken: dict[str, Failure] = {}
        """Last failure of every slot without an episode since."""
        self._quarantined: dict[str, j.Quarantined] = {}
        """By slot; the event comes right before the failure that caused it."""

    def take(self, event: j.JournalEvent, at: float) -> Failure | None:
        """Returns a failure if the event is one."""
        match event:
            case j.TurnEnded():
                self._turned(event.trajectory, at)
            case j.GroupOpened():
                self._tasks[event.group] = event.task
            case j.GroupEnded():
                self._tasks.pop(event.group, None)
            case j.TrajectoryStarted():
                self._started(event, at)
            case j.Placed():
                self._placed(event, at)
            case j.TrajectoryEnded():
                return self._ended(event, at)
            case j.Quarantined():
                self._quarantined[event.part] = event
            case _:
                pass
        return None

    def finish(self, at: float) -> None:
        """End of the journal: open operations have lasted until now."""
        for open in self._open.values():
            self._record_wait(open.slot, at, at - open.since, f"{open.stage}, still open")

    def slowest(self) -> list[Slot]:
        return sorted(self.slots.values(), key=lambda slot: -slot.longest_s)[:MOST_SLOTS]

    def _started(self, event: j.TrajectoryStarted, at: float) -> None:
        name = event.environment
        slot = self.slots.get(name)
        if slot is None:
            slot = self.slots[name] = Slot(name=name, task=self._tasks.get(event.group, ""))
        slot.episodes += 1
        self._open[event.trajectory] = _Open(slot, at, RESET)
        broken = self._broken.pop(name, None)
        if broken is not None:
            broken.done += f"; next episode there after {at - broken.at:.1f} s"

    def _placed(self, event: j.Placed, at: float) -> None:
        open = self._open.get(event.trajectory)
        if open is None:
            return
        open.engine = event.engine
        if open.stage == RESET:
            slot, seconds = open.slot, at - open.since
            slot.resets += 1
            slot.reset_s += seconds
            self._record_wait(slot, at, seconds, RESET)
            open.since, open.stage = at, TURN

    def _turned(self, trajectory: TrajectoryId, at: float) -> None:
        open = self._open.get(trajectory)
        if open is None:
            return
        if open.stage == STEP:
            slot, seconds = open.slot, at - open.since
            slot.rounds += 1
            slot.round_s += seconds
            self._record_wait(slot, at, seconds, "step and turn")
        open.since, open.stage = at, STEP

    def _ended(self, event: j.TrajectoryEnded, at: float) -> Failure | None:
        open = self._open.pop(event.trajectory, None)
        if open is None:
            return None
        slot, seconds = open.slot, at - open.since
        if event.outcome not in FAILURES:
            if event.reward is not None:
                self._record_wait(slot, at, seconds, "step and reward")
            return None
        self.failed += 1
        failure = Failure(
            at=at,
            since=open.since,
            task=slot.task,
            trajectory=event.trajectory,
            part=slot.name,
            outcome=event.outcome.value,
            what=open.stage,
            hung=event.failure is FailureKind.DEADLINE,
            cause=event.cause,
            done="another trajectory took its place",
        )
        if event.outcome is Outcome.ENV_FAILED:
            slot.failures += 1
            self._record_wait(slot, at, seconds, f"{open.stage} that failed")
            failure.done = _action(self._quarantined.pop(slot.name, None))
            self._broken[slot.name] = failure
        else:
            failure.part = open.engine if event.outcome is Outcome.ENGINE_FAILED else "reward"
        if len(self.failures) < MOST_FAILURES:
            self.failures.append(failure)
        return failure

    def _record_wait(self, slot: Slot, at: float, seconds: float, what: str) -> None:
        if seconds > slot.longest_s:
            slot.longest_s, slot.longest_at, slot.longest = seconds, at, what


def _action(quarantined: j.Quarantined | None) -> str:
    if quarantined is None:
        return "the slot gets a fresh environment"
    if quarantined.until < quarantined.at:
        return "the slot is given up"
    pause_s = quarantined.until - quarantined.at
    return f"the slot is set aside for {pause_s:.0f} s after {quarantined.failures} failures"
