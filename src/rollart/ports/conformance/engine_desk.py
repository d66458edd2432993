"""What the engine suite is told about an engine (`EngineHarness`), and a controller as small as it gets (`Desk`)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple, Self

from rollart.ports.conformance.case import ConformanceError, check
from rollart.ports.conformance.drive import WorkerDrive
from rollart.ports.worker import Worker
from rollart.types.ids import RequestId, TrajectoryId
from rollart.types.messages import (
    Add,
    EngineInfo,
    FinishReason,
    PrefixMiss,
    Progress,
    Refused,
    Sampling,
    Stage,
    Staged,
    StageFailed,
    TurnDone,
    TurnUsage,
    Update,
    Updated,
    WorkerEvent,
)
from rollart.types.tokens import NOTHING, Generated, Segment, TokenSequence
from rollart.types.versions import Version
from rollart.types.weights import Manifest

PROMPT_TOKENS = 12
MOMENTS = (0.5, 0.25, 0.75, 0.1, 0.4, 0.6, 0.9, 0.05, 0.15, 0.02)
"""Where in a turn to interfere, as shares of how long one took: lengths are drawn, so one share need not hit."""


@dataclass(kw_only=True)
class EngineHarness:
    """One engine that has never served a version, and the store it stages from.

    `long_turn` is a `max_tokens` for which a turn takes many steps. `cache_block` is the grain in which a kept prefix
    is found again: 1 if at most the last sampled token is computed once more.
    """

    build: Callable[[Callable[[], None]], Worker]
    publish: Callable[[Version], Manifest]
    """Put a version with weights of its own into the store."""
    tokens: Callable[[int], Segment]
    """A prompt of so many tokens that the engine takes; simulated ones have no payload."""
    virtual: bool
    corrupt: Callable[[Manifest], None] | None = None
    """Damage a published version in the store, or on its way, so that its digest cannot hold."""
    every_token: tuple[int, ...] = ()
    """All ids that can be sampled, so that with these as stop tokens the first ends a turn; empty in simulation."""
    long_turn: int = 64
    cache_block: int = 1
    task: str = "conformance"


@dataclass
class Session:
    """One trajectory's token log, as the controller keeps it."""

    id: TrajectoryId
    log: TokenSequence = field(default_factory=TokenSequence)


class Turn(NamedTuple):
    """A whole turn: what its `Progress` parts and its `TurnDone` add up to."""

    generated: Generated
    finish: FinishReason
    usage: TurnUsage
    max_tokens: int

    @property
    def tokens(self) -> int:
        return self.generated.tokens.length

    @property
    def versions(self) -> list[Version]:
        return [run.version for run in self.generated.runs]


class Desk:
    """Sends turns to one engine and keeps their logs."""

    def __init__(self, harness: EngineHarness) -> None:
        self.harness = harness
        self.drive = WorkerDrive(harness.build, virtual=harness.virtual)
        info = self.drive.info
        if not isinstance(info, EngineInfo):
            raise ConformanceError(f"an engine says what it can do with EngineInfo, not with {type(info).__name__}")
        self.info: EngineInfo = info
        self._adds: dict[RequestId, Add] = {}
        self._sessions = 0
        self._steps = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.drive.__exit__(kind, error, traceback)

    # --- versions ---------------------------------------------------------------------------------------------------

    def publish(self) -> Manifest:
        """The next version, in the store only."""
        self._steps += 1
        return self.harness.publish(Version(0, self._steps))

    def stage(self) -> Version:
        """The next version, staged."""
        manifest = self.publish()
        place = self.drive.mark()
        self.drive.send(Stage(manifest))
        answer = self.drive.until(about_stage(manifest.version), after=place)
        check(isinstance(answer, Staged), f"a whole version is staged, but {manifest.version} gave {answer}")
        return manifest.version

    def update(self, version: Version) -> None:
        """Have a staged version served."""
        place = self.drive.mark()
        self.drive.send(Update(version))
        answer = self.drive.until(about_update(version), after=place)
        check(isinstance(answer, Updated), f"a staged version can be served, but {version} gave {answer}")

    def serve(self) -> Version:
        """The next version, in service."""
        version = self.stage()
        self.update(version)
        return version

    # --- turns ------------------------------------------------------------------------------------------------------

    def session(self) -> Session:
        self._sessions += 1
        return Session(TrajectoryId(self._sessions))

    def prepare(
        self,
        session: Session,
        new: Segment | None = None,
        *,
        max_tokens: int = 4,
        stop_tokens: tuple[int, ...] = (),
    ) -> Add:
        """The request for the session's next turn; the new part is in the log from here on."""
        session.log.append_context(self.harness.tokens(PROMPT_TOKENS) if new is None else new)
        request = RequestId(len(self._adds) + 1)
        add = Add(
            request=request,
            session=session.id,
            task=self.harness.task,
            prefix_length=session.log.turn_length,
            prefix_digest=session.log.turn_digest,
            new=session.log.since_turn(),
            sampling=Sampling(max_tokens=max_tokens, stop_tokens=stop_tokens, seed=request),
        )
        self._adds[request] = add
        return add

    def ask(
        self, session: Session, new: Segment | None = None, *, max_tokens: int = 4, stop_tokens: tuple[int, ...] = ()
    ) -> RequestId:
        """Send the session's next turn."""
        add = self.prepare(session, new, max_tokens=max_tokens, stop_tokens=stop_tokens)
        self.drive.send(add)
        return add.request

    def answer(self, request: RequestId, *, after: int = 0) -> TurnDone | PrefixMiss | Refused:
        """What became of a request."""
        event = self.drive.until(lambda event: ends(event, request), after=after)
        assert isinstance(event, TurnDone | PrefixMiss | Refused)
        return event

    def finish(self, session: Session, request: RequestId, *, after: int = 0) -> Turn:
        """Wait for a turn to end, put it together, and into the log."""
        end = self.answer(request, after=after)
        if not isinstance(end, TurnDone):
            raise ConformanceError(f"the engine holds all that the turn needs, but it answered {end}")
        generated = self.reported(request).then(end.generated)
        session.log.append_sampled(generated)
        return Turn(generated, end.finish, end.usage, self._adds[request].sampling.max_tokens)

    def turn(self, session: Session, new: Segment | None = None, *, max_tokens: int = 4) -> Turn:
        """One turn from its request to its end."""
        return self.finish(session, self.ask(session, new, max_tokens=max_tokens))

    def reported(self, request: RequestId) -> Generated:
        """What `Progress` has told of a request."""
        whole = NOTHING
        for event in self.drive.events:
            if isinstance(event, Progress):
                for part, generated in event.parts:
                    if part == request:
                        whole = whole.then(generated)
        return whole

    def endings(self, request: RequestId) -> list[WorkerEvent]:
        """Everything so far that ends a request; one, if the engine is right."""
        return [event for event in self.drive.events if ends(event, request)]

    def typical_turn_s(self) -> float:
        """How long a long turn takes."""
        start = self.drive.now()
        self.turn(self.session(), max_tokens=self.harness.long_turn)
        return self.drive.now() - start

    def mid_turn(self, *, staging: bool = False) -> Iterator[tuple[Session, RequestId, Version]]:
        """Turns that have begun and not ended, one after the other; take the first that turns out to be in the middle.

        With `staging` a fresh version is staged for each; otherwise the version means nothing.
        """
        typical_s = self.typical_turn_s()
        for moment in MOMENTS:
            version = self.stage() if staging else Version(0, self._steps)
            session = self.session()
            request = self.ask(session, max_tokens=self.harness.long_turn)
            self.drive.run_for(moment * typical_s)
            if not self.endings(request):
                yield session, request, version


def ends(event: WorkerEvent, request: RequestId) -> bool:
    """Whether an event is the answer to a request."""
    return isinstance(event, TurnDone | PrefixMiss | Refused) and event.request == request


def about_stage(version: Version) -> Callable[[WorkerEvent], bool]:
    """Answers to `Stage(version)`."""
    return lambda event: isinstance(event, Staged | StageFailed) and event.version == version


def about_update(version: Version) -> Callable[[WorkerEvent], bool]:
    """Answers to `Update(version)`."""
    return lambda event: isinstance(event, Updated | StageFailed) and event.version == version
