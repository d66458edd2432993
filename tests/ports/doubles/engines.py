"""Engines that break one promise each."""

from doubles.bent import Bent, replace
from rollart.ports.worker import Advance, Worker
from rollart.types.ids import RequestId
from rollart.types.messages import (
    Abort,
    Add,
    PrefixMiss,
    Progress,
    Staged,
    StageFailed,
    Suspend,
    TurnDone,
    Update,
    Updated,
    WorkerCommand,
    WorkerEvent,
)
from rollart.types.tokens import LOGPROB, Generated, Segment, VersionRun
from rollart.types.versions import Version


class LosesAToken(Bent):
    """The last token of a longer turn is never reported."""

    def event(self, event: WorkerEvent) -> list[WorkerEvent]:
        if isinstance(event, TurnDone) and event.generated.tokens.length > 1:
            return [replace(event, generated=shortened(event.generated))]
        return [event]


class DropsProgress(Bent):
    """`Progress` never arrives."""

    def event(self, event: WorkerEvent) -> list[WorkerEvent]:
        return [] if isinstance(event, Progress) else [event]


class StampsTheOldVersion(Bent):
    """After an update tokens still carry the version before it."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self._served: list[Version] = []

    def event(self, event: WorkerEvent) -> list[WorkerEvent]:
        if isinstance(event, Updated) and event.version not in self._served:
            self._served.append(event.version)
        if isinstance(event, TurnDone) and len(self._served) > 1:
            return [replace(event, generated=stamped(event.generated, self._served[-2]))]
        return [event]


class ServesTheUnstaged(Bent):
    """Any version in `Update` is reported as in service, and stamped on tokens."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self._lie: Version | None = None
        self._updating: Version | None = None

    def command(self, command: WorkerCommand) -> list[WorkerCommand]:
        self._updating = command.version if isinstance(command, Update) else None
        return [command]

    def event(self, event: WorkerEvent) -> list[WorkerEvent]:
        if isinstance(event, StageFailed) and event.version == self._updating:
            self._lie = event.version
            return [Updated(event.version)]
        if isinstance(event, TurnDone) and self._lie is not None:
            return [replace(event, generated=stamped(event.generated, self._lie))]
        return [event]


class BelievesTheStore(Bent):
    """A version whose digests do not hold is staged all the same."""

    def event(self, event: WorkerEvent) -> list[WorkerEvent]:
        return [Staged(event.version)] if isinstance(event, StageFailed) else [event]


class RecomputesNothing(Bent):
    """Declares `recompute`, and keeps the KV of other weights."""

    def event(self, event: WorkerEvent) -> list[WorkerEvent]:
        if isinstance(event, TurnDone):
            return [replace(event, usage=replace(event.usage, recomputed=0))]
        return [event]


class AnswersTwice(Bent):
    """Every turn ends twice."""

    def event(self, event: WorkerEvent) -> list[WorkerEvent]:
        return [event, event] if isinstance(event, TurnDone) else [event]


class IgnoresAbort(Bent):
    """An aborted request runs to its own end."""

    def command(self, command: WorkerCommand) -> list[WorkerCommand]:
        return [] if isinstance(command, Abort) else [command]


class IgnoresSuspend(Bent):
    """Steps go on while it should be suspended."""

    def command(self, command: WorkerCommand) -> list[WorkerCommand]:
        return [] if isinstance(command, Suspend) else [command]


class ForgetsSessions(Bent):
    """Declares sessions, and never holds a prefix."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self._missed: list[WorkerEvent] = []

    def command(self, command: WorkerCommand) -> list[WorkerCommand]:
        if isinstance(command, Add) and command.prefix_length:
            self._missed.append(PrefixMiss(command.request))
            return []
        return [command]

    def advance(self, now: float) -> Advance:
        advance = super().advance(now)
        missed, self._missed = self._missed, []
        return Advance([*missed, *advance.events], advance.wake_at)


class IgnoresTheWhole(Bent):
    """Takes the whole after a `PrefixMiss` for a doubled `Add`."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self._seen: set[RequestId] = set()

    def command(self, command: WorkerCommand) -> list[WorkerCommand]:
        if isinstance(command, Add):
            if command.request in self._seen:
                return []
            self._seen.add(command.request)
        return [command]


class LosesALogprob(Bent):
    """One log-probability fewer than tokens."""

    def event(self, event: WorkerEvent) -> list[WorkerEvent]:
        if isinstance(event, TurnDone) and event.generated.logprobs:
            kept = event.generated.logprobs[: -LOGPROB.itemsize]
            return [replace(event, generated=replace(event.generated, logprobs=kept))]
        return [event]


def shortened(generated: Generated) -> Generated:
    """Without its last token, consistently: the runs still cover what is left."""
    *before, last = generated.runs
    runs = (*before, VersionRun(last.version, last.length - 1)) if last.length > 1 else tuple(before)
    return Generated(Segment(generated.tokens.length - 1, None), None, runs)


def stamped(generated: Generated, version: Version) -> Generated:
    length = generated.tokens.length
    return replace(generated, runs=(VersionRun(version, length),) if length else ())
