"""The protocol part of every engine worker: ordered commands, sessions, versions, reports.

`EngineShell` implements the engine's side of the protocol (`types.messages`), once for all engines. An engine
implements the rest: which requests it cannot sample (`_refuses`), starting and aborting a turn (`_start`, `_abort`),
pulling and serving a version (`_fetch`, `_swap`), and `advance`, which decides when things happen.

    commands ─► _obey ─► _start, _abort, _fetch, _swap ─► the engine generates
    events ◄─── _note ◄── TurnDone, Refused, Staged, StageFailed, Updated ◄──┘

An engine that generates inside `advance` derives from `SteppedEngine`. One that generates elsewhere, in other threads
or processes, derives from `EngineShell`: its `advance` passes everything reported to it since the last call to `_note`,
then calls `_obey_commands`, then `_report`. What such an engine cannot answer at once it answers later, through
`_note`: the end of an aborted turn, and `Updated`.

Invariants:
- every `Add` that is not a duplicate is answered by exactly one of `TurnDone`, `PrefixMiss`, `Refused`;
- a session has one turn: an `Add` aborts the previous one;
- only a version that was staged, and is newer than the one in service, is served;
- commands take effect in order; while a version is being loaded, `Stage` and `Update` wait for it, and with them all
  later commands;
- while it has requests and is not suspended, an engine reports twice per `progress_interval_s`.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from pydantic import ConfigDict, Field

from rollart.backends.engines.sessions import Session, Sessions, Turn
from rollart.config.base import Strict
from rollart.config.pools import PoolSettings
from rollart.ports.worker import Advance
from rollart.types.errors import InvariantBroken
from rollart.types.ids import RequestId, TrajectoryId
from rollart.types.messages import (
    Abort,
    Add,
    EndSession,
    EngineInfo,
    KvOnUpdate,
    PrefixMiss,
    Progress,
    Refused,
    Resume,
    Sampling,
    Stage,
    Staged,
    StageFailed,
    Suspend,
    TaskWork,
    TurnDone,
    Update,
    Updated,
    WorkerCommand,
    WorkerEvent,
)
from rollart.types.versions import Version
from rollart.types.weights import Manifest

REMEMBERED_REQUESTS = 65_536
"""Number of request ids kept for de-duplication."""

S = TypeVar("S", bound=Session)
T = TypeVar("T", bound=Turn)
Reported = TurnDone | Refused | Staged | StageFailed | Updated
"""Reports of an engine to its shell, and of the shell to the controller."""


class EngineSettings(Strict):
    """Settings of an engine: those of its pool, and those that only the run knows."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    model: str | dict[str, Any]
    store: Any
    """A `WeightStore`, the source of all versions."""
    pool: PoolSettings = PoolSettings()
    max_context: int = Field(default=1024, ge=2)
    progress_interval_s: float = Field(default=5.0, gt=0)

    def info(self, kv_on_update: KvOnUpdate, *, max_context: int | None = None) -> EngineInfo:
        """`max_context` is the engine's own limit, if that is below the configured one."""
        return EngineInfo(
            slots=self.pool.slots,
            max_context=max_context or self.max_context,
            kv_on_update=kv_on_update,
            sessions=True,
            progress_interval_s=self.progress_interval_s,
        )


class Steps(NamedTuple):
    """Steps since the last report, for `Progress`."""

    taken: int
    stepping_s: float = 0.0
    recompute_s: float = 0.0
    work: tuple[TaskWork, ...] = ()


class EngineShell(ABC, Generic[S, T]):
    """The protocol of an engine. `S` and `T` are its kinds of sessions and turns."""

    _context_limit = "its max_context"
    """Name of the context limit, for refusal messages."""

    def __init__(
        self, info: EngineInfo, sessions: Sessions[S], *, vocabulary: int, version: Version | None = None
    ) -> None:
        """`version` is already in service; None if the first one has to be staged."""
        self._info = info
        self._vocabulary = vocabulary
        self._sessions = sessions
        self._turns: dict[RequestId, T] = {}
        """Turns in flight, running or queued, in order of arrival."""
        self._known: dict[RequestId, None] = {}
        self._prefix_misses = 0
        self._version = version
        """Version in service."""
        self._loading: Version | None = None
        """Version being loaded, to enter service next."""
        self._staged: dict[Version, bool] = {}
        """Versions beside the one in service: True when ready, False while being pulled."""
        self._suspended = False
        self._report_at: float | None = None
        self._commands: deque[WorkerCommand] = deque()

    # --- the Worker port

    def info(self) -> EngineInfo:
        return self._info

    def post(self, commands: Sequence[WorkerCommand]) -> None:
        self._commands.extend(commands)

    @abstractmethod
    def advance(self, now: float) -> Advance:
        """See `ports.worker.Worker`, and the top of this file."""

    def close(self) -> None:
        self._turns.clear()
        self._sessions.close()

    # --- what an engine implements

    @abstractmethod
    def _refuses(self, sampling: Sampling) -> str:
        """Why this engine cannot sample this way; empty if it can. Generally invalid requests are refused before."""

    @abstractmethod
    def _start(self, add: Add, session: S) -> T:
        """Run a turn as soon as there is capacity. The session has its whole prompt, and no other turn."""

    @abstractmethod
    def _abort(self, turn: T) -> TurnDone | None:
        """Stop a turn. None if its end comes later, in which case this may be called again."""

    @abstractmethod
    def _fetch(self, manifest: Manifest) -> None:
        """Start to stage a version; `Staged` or `StageFailed` follows. Called once per attempt."""

    @abstractmethod
    def _swap(self, version: Version) -> bool:
        """Serve a staged version from the next step on. False if it takes time; `Updated` then follows."""

    @abstractmethod
    def _steps_taken(self) -> Steps | None:
        """Steps since the last call, for the report that is due; None to stay silent, as if the engine had hung."""

    def _suspend(self) -> None:
        """Take no step until `_resume`; idempotent. For engines whose steps are taken elsewhere."""

    def _resume(self) -> None:
        """Undo `_suspend`; may be called without it."""

    # --- what it calls

    def _active(self) -> bool:
        """Whether there is anything to generate."""
        return bool(self._turns) and not self._suspended

    def _note(self, reported: Iterable[Reported], events: list[WorkerEvent]) -> None:
        """Process the engine's reports and forward them."""
        for event in reported:
            match event:
                case TurnDone() | Refused():
                    self._end(event.request)
                case Staged(version):
                    self._staged[version] = True
                case StageFailed(version):
                    self._staged.pop(version, None)
                case Updated(version):
                    self._version, self._loading = version, None
                    self._staged = {other: ready for other, ready in self._staged.items() if other > version}
            events.append(event)

    def _obey_commands(self, events: list[WorkerEvent]) -> None:
        commands = self._commands
        while commands and not (self._loading is not None and isinstance(commands[0], Stage | Update)):
            self._obey(commands.popleft(), events)

    def _report(self, now: float, events: list[WorkerEvent]) -> None:
        """Report if it is due: twice as often as promised, because steps take time."""
        if not self._active():
            return  # `_report_at` stays, so that an engine with short turns and pauses still reports its steps
        if self._report_at is None:
            self._report_at = now + self._info.progress_interval_s / 2
        if now < self._report_at:
            return
        self._report_at = now + self._info.progress_interval_s / 2
        steps = self._steps_taken()
        if steps is not None:
            parts = tuple((turn.request, turn.report()) for turn in self._turns.values() if turn.has_news)
            events.append(Progress(parts, *steps))

    # --- commands

    def _obey(self, command: WorkerCommand, events: list[WorkerEvent]) -> None:
        match command:
            case Add():
                self._add(command, events)
            case Abort(request):
                self._stop(request, events)
            case EndSession(id):
                self._end_session(id, events)
            case Suspend():
                self._suspended = True
                self._suspend()
            case Resume():
                self._suspended = False
                self._resume()
            case Stage(manifest):
                self._stage(manifest, events)
            case Update(version):
                self._update(version, events)
            case _:
                raise InvariantBroken(f"an engine does not take {type(command).__name__}; this is a bug of rollart")

    def _add(self, add: Add, events: list[WorkerEvent]) -> None:
        if add.request in self._known:
            return
        session = self._sessions.get(add.session)
        if add.prefix_length and (session is None or not session.holds(add.prefix_length, add.prefix_digest)):
            # Not remembered: the same request returns with all tokens.
            self._prefix_misses += 1
            events.append(PrefixMiss(add.request))
            return
        problem = self._problem(add)
        if problem:
            events.append(Refused(add.request, problem))
            return
        if session is not None:
            # The controller has moved on from an older turn.
            self._supersede(session, events)
        if session is None or not add.prefix_length:
            session = self._sessions.open(add.session)
        self._sessions.cut(session, add.prefix_length)
        session.append(add.new.ids())
        self._known[add.request] = None
        if len(self._known) > REMEMBERED_REQUESTS:
            del self._known[next(iter(self._known))]
        session.turn = self._turns[add.request] = self._start(add, session)

    def _problem(self, add: Add) -> str:
        """Why the request can never be served here; empty if it can."""
        sampling = add.sampling
        if self._version is None and self._loading is None:
            return "this engine has no weights yet: stage and update it first"
        if sampling.max_tokens < 1 or not 0 <= sampling.temperature < float("inf"):
            return f"cannot sample {sampling.max_tokens} tokens at temperature {sampling.temperature:g}"
        problem = self._refuses(sampling)
        if problem:
            return problem
        length, longest = add.prefix_length + add.new.length, self._info.max_context - 1
        if not 0 < length <= longest:
            return f"a context of {length} tokens, but this engine takes 1 to {longest} by {self._context_limit}"
        if add.new.payload is None:
            return "a simulated segment, but this engine needs tokens"
        new = add.new.ids()
        if new.size and not (new.min() >= 0 and new.max() < self._vocabulary):
            return f"tokens from {new.min()} to {new.max()}, but the vocabulary has {self._vocabulary}: check the codec"
        return ""

    def _stop(self, request: RequestId, events: list[WorkerEvent]) -> None:
        turn = self._turns.get(request)
        done = None if turn is None else self._abort(turn)
        if done is not None:
            self._note([done], events)

    def _supersede(self, session: S, events: list[WorkerEvent]) -> None:
        """Abort the session's turn, if any; its later tokens are reported, but no longer belong to the session."""
        older, session.turn = session.turn, None
        if older is not None:
            self._stop(older.request, events)

    def _end(self, request: RequestId) -> None:
        turn = self._turns.pop(request)
        session = self._sessions.get(turn.session.id)
        if session is not None and session.turn is turn:
            session.turn = None
            self._sessions.settle(session)

    def _end_session(self, id: TrajectoryId, events: list[WorkerEvent]) -> None:
        session = self._sessions.get(id)
        if session is not None:
            self._supersede(session, events)
            self._sessions.drop(id)

    # --- versions

    def _stage(self, manifest: Manifest, events: list[WorkerEvent]) -> None:
        version = manifest.version
        if version == self._version:
            events.append(Staged(version))
        elif self._version is not None and version < self._version:
            events.append(StageFailed(version, f"{self._version} is in service; versions only grow"))
        elif version not in self._staged:
            self._staged[version] = False
            self._fetch(manifest)
        elif self._staged[version]:
            events.append(Staged(version))

    def _update(self, version: Version, events: list[WorkerEvent]) -> None:
        if version == self._version:
            events.append(Updated(version))
        elif self._version is not None and version < self._version:
            events.append(StageFailed(version, f"{self._version} is in service; versions only grow"))
        elif not self._staged.get(version):
            events.append(StageFailed(version, f"{version} is not staged here; stage it and wait for Staged"))
        elif self._swap(version):
            self._note([Updated(version)], events)
        else:
            self._loading = version
