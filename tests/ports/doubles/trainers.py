"""Trainers that break one promise each."""

from doubles.bent import Bent, replace
from rollart.ports.worker import Advance, Worker
from rollart.types.ids import ClaimId
from rollart.types.messages import Published, Save, Saved, Train, Trained, TrainerFailed, WorkerCommand, WorkerEvent
from rollart.types.versions import Version


class TrainsTwice(Bent):
    """Every `Train` is a new claim to it."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self._trained = 0
        self._asked: dict[ClaimId, Train] = {}

    def command(self, command: WorkerCommand) -> list[WorkerCommand]:
        if isinstance(command, Train):
            self._trained += 1
            hidden = replace(
                command, claim=ClaimId(self._trained), version=Version(command.version.epoch, 1000 + self._trained)
            )
            self._asked[hidden.claim] = command
            return [hidden]
        return [command]

    def event(self, event: WorkerEvent) -> list[WorkerEvent]:
        if isinstance(event, Trained):
            asked = self._asked[event.claim]
            return [Trained(asked.claim, asked.version, {})]
        return [event]


class HidesItsFailures(Bent):
    """A failed publication is reported as a success."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self._last: list[WorkerEvent] = []

    def event(self, event: WorkerEvent) -> list[WorkerEvent]:
        if isinstance(event, Published):
            self._last = [event]
        return self._last if isinstance(event, TrainerFailed) and event.claim is None else [event]


class ForgetsItsParent(Bent):
    """Every version is published without its parent."""

    def event(self, event: WorkerEvent) -> list[WorkerEvent]:
        return [Published(replace(event.manifest, parent=None))] if isinstance(event, Published) else [event]


class SavesNothing(Bent):
    """Answers `Saved` without saving, at once."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self._answers: list[WorkerEvent] = []

    def command(self, command: WorkerCommand) -> list[WorkerCommand]:
        if isinstance(command, Save) and not self.keeps(command):
            self._answers.append(Saved(command.version))
            return []
        return [command]

    def advance(self, now: float) -> Advance:
        advance = super().advance(now)
        answers, self._answers = self._answers, []
        return Advance([*advance.events, *answers], advance.wake_at)

    def keeps(self, command: Save) -> bool:  # noqa: ARG002
        return False


class KeepsItsFirst(SavesNothing):
    """Saves once and answers `Saved` ever after: the next trainer restores an older version."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self._kept: Save | None = None

    def keeps(self, command: Save) -> bool:
        self._kept = self._kept or command
        return command == self._kept


class LosesItsMoments(Bent):
    """Restores the weights and not the optimiser; only the reference trainer has one to lose."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        worker._optimizer.state.clear()  # type: ignore[attr-defined]
