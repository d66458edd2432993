"""Description of an engine for the suite (`EngineHarness`), and a minimal controller (`Desk`)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple, Self

from rollart.conformance.case import ConformanceError, check
from rollart.conformance.drive import WorkerDrive
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
"""Points in a turn at which to interfere, as shares of a typical duration: lengths are drawn, so one share may miss."""


@dataclass(kw_only=True)
class EngineHarness:
    """One engine that has never served a version, and the store it stages from.

    `long_turn` is a `max_tokens` for which a turn takes many steps. `cache_block` is the block size of the prefix
    cache: 1 if at most the last sampled token is recomputed.
    """

    build: Callable[[Callable[[], None]], Worker]
    publish: Callable[[Version], Manifest]
    """Publish a version with distinct weights to the store."""
    tokens: Callable[[int], Segment]
    """A valid prompt of this many tokens; simulated ones have no payload."""
    virtual: bool
    corrupt: Callable[[Manifest], None] | None = None
    """Damage a published version in the store, or in transit, so that its digest no longer matches."""
    every_token: tuple[int, ...] = ()
    """All ids that can be sampled; as stop tokens they end a turn at its first token. Empty in simulation."""
    long_turn: int = 64
    cache_block: int = 1
    task: str = "conformance"


@dataclass
class Session:
    """One trajectory's token log, as the controller keeps it."""

    id: TrajectoryId
    log: TokenSequence = field(default_factory=TokenSequence)


class Turn(NamedTuple):
    """A complete turn: the sum of its `Progress` parts and its `TurnDone`."""

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
            raise ConformanceError(f"an engine joins with EngineInfo, not with {type(info).__name__}")
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
        """Publish the next version to the store."""
        self._steps += 1
        return self.harness.publish(Version(0, self._steps))

    def stage(self) -> Version:
        """Publish and stage the next version."""
        manifest = self.publish()
        place = self.drive.mark()
        self.drive.send(Stage(manifest))
        answer = self.drive.until(about_stage(manifest.version), after=place)
        check(isinstance(answer, Staged), f"an intact version can be staged, but {manifest.version} gave {answer}")
        return manifest.version

    def update(self, version: Version) -> None:
        """Commit a staged version."""
        place = self.drive.mark()
        self.drive.send(Update(version))
        answer = self.drive.until(about_update(version), after=place)
        check(isinstance(answer, Updated), f"a staged version can be served, but {version} gave {answer}")

    def serve(self) -> Version:
        """Publish, stage and commit the next version."""
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
        """The request for the session's next turn; its new part is in the log from here on."""
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
        """The event that ends a request."""
        event = self.drive.until(lambda event: ends(event, request), after=after)
        assert isinstance(event, TurnDone | PrefixMiss | Refused)
        return event

    def finish(self, session: Session, request: RequestId, *, after: int = 0) -> Turn:
        """Wait for a turn to end, assemble it, and append it to the log."""
        end = self.answer(request, after=after)
        if not isinstance(end, TurnDone):
            raise ConformanceError(f"the engine holds everything the turn needs, but it answered {end}")
        generated = self.reported(request).then(end.generated)
        session.log.append_sampled(generated)
        return Turn(generated, end.finish, end.usage, self._adds[request].sampling.max_tokens)

    def turn(self, session: Session, new: Segment | None = None, *, max_tokens: int = 4) -> Turn:
        """One turn from request to end."""
        return self.finish(session, self.ask(session, new, max_tokens=max_tokens))

    def reported(self, request: RequestId) -> Generated:
        """Tokens of a request reported by `Progress` so far."""
        whole = NOTHING
        for event in self.drive.events:
            if isinstance(event, Progress):
                for part, generated in event.parts:
                    if part == request:
                        whole = whole.then(generated)
        return whole

    def endings(self, request: RequestId) -> list[WorkerEvent]:
        """All events so far that end a request; exactly one if the engine is correct."""
        return [event for event in self.drive.events if ends(event, request)]

    def typical_turn_s(self) -> float:
        """Duration of a long turn."""
        start = self.drive.now()
        self.turn(self.session(), max_tokens=self.harness.long_turn)
        return self.drive.now() - start

    def mid_turn(self, *, staging: bool = False) -> Iterator[tuple[Session, RequestId, Version]]:
        """Turns in flight, one after the other; the caller stops at the first one that it caught in the middle.

        With `staging` a new version is staged for each; otherwise the version is meaningless. In real time the first
        turn may have been slow (a busy machine, an import): a turn that ended before its moment is the new measure.
        """
        typical_s = self.typical_turn_s()
        for moment in MOMENTS:
            version = self.stage() if staging else Version(0, self._steps)
            session = self.session()
            place = len(self.drive.slices)
            request = self.ask(session, max_tokens=self.harness.long_turn)
            self.drive.run_for(moment * typical_s)
            if not self.endings(request):
                yield session, request, version
            elif not self.harness.virtual:
                typical_s = min(typical_s, self.drive.slices[-1].at - self.drive.slices[place].at)


def ends(event: WorkerEvent, request: RequestId) -> bool:
    """Whether an event ends a request."""
    return isinstance(event, TurnDone | PrefixMiss | Refused) and event.request == request


def about_stage(version: Version) -> Callable[[WorkerEvent], bool]:
    """Answers to `Stage(version)`."""
    return lambda event: isinstance(event, Staged | StageFailed) and event.version == version


def about_update(version: Version) -> Callable[[WorkerEvent], bool]:
    """Answers to `Update(version)`."""
    return lambda event: isinstance(event, Updated | StageFailed) and event.version == version
