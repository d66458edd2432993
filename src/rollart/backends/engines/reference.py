"""The reference engine: a `transformers` model, one request at a time, plain enough to be seen to be right.

`generate` cannot be interrupted, so a turn is sampled in chunks: one `advance` is one chunk of one request, in turn,
and commands act between two chunks. The prefix is computed again for every chunk; `TurnUsage` says what an engine with
a KV cache per session would have computed.

What holds:
- every `Add` that is not a double is answered by exactly one of `TurnDone`, `PrefixMiss`, `Refused`;
- a token carries the version that was in service in the chunk that sampled it, and that version was verified;
- a session holds exactly the tokens that the controller sent and was sent, in order.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field

from rollart.backends.engines.sampling import sample_chunk
from rollart.backends.engines.staging import Staging, Tensors
from rollart.backends.models import build_model
from rollart.config.base import Strict
from rollart.ports.worker import Advance
from rollart.types.errors import InvariantBroken
from rollart.types.ids import RequestId, TrajectoryId
from rollart.types.messages import (
    Abort,
    Add,
    EndSession,
    EngineInfo,
    FinishReason,
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
    TurnDone,
    TurnUsage,
    Update,
    Updated,
    WorkerCommand,
    WorkerEvent,
)
from rollart.types.tokens import NOTHING, TOKEN, Generated, Segment, VersionRun, prefix_digest
from rollart.types.versions import Version
from rollart.types.weights import Manifest

REMEMBERED_REQUESTS = 65_536
"""Of so many requests a doubled `Add` is recognised."""


class ReferenceEngineSettings(Strict):
    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    model: str | dict[str, Any]
    store: Any
    """A `WeightStore`; all weights come from it."""
    slots: int = Field(default=8, ge=1)
    max_context: int = Field(default=1024, ge=2)
    dtype: str = "float32"
    device: str = "cpu"
    chunk_tokens: int = Field(default=8, ge=1)
    progress_interval_s: float = Field(default=5.0, gt=0)


class _Session:
    """The tokens of a trajectory, and of how many of them KV would be held, computed with which version."""

    def __init__(self) -> None:
        self.tokens = b""
        self.computed = 0
        self.computed_with: Version | None = None

    @property
    def length(self) -> int:
        return len(self.tokens) // TOKEN.itemsize

    def ids(self) -> NDArray[np.int32]:
        return np.frombuffer(self.tokens, dtype=TOKEN)

    def holds(self, length: int, digest: bytes) -> bool:
        return length <= self.length and prefix_digest(self.tokens[: length * TOKEN.itemsize]) == digest

    def cut(self, length: int) -> None:
        self.tokens = self.tokens[: length * TOKEN.itemsize]
        self.computed = min(self.computed, length)


class _Turn:
    """A request in flight."""

    def __init__(self, add: Add, session: _Session) -> None:
        self.request: RequestId = add.request
        self.session_id: TrajectoryId = add.session
        self.session = session
        self.sampling: Sampling = add.sampling
        self.sampled = 0
        self.unreported: Generated = NOTHING
        self.started = False
        self.prefilled = 0
        self.cached = 0
        self.recomputed = 0

    def count(self, version: Version) -> None:
        """What has to be in the KV cache for the next step: how much of it is there, void, or new."""
        session = self.session
        if session.computed_with != version:
            self.recomputed += session.computed
        elif not self.started:
            self.cached += session.computed
        if not self.started:
            self.prefilled += session.length - session.computed
        self.started = True

    def done(self, finish: FinishReason) -> TurnDone:
        usage = TurnUsage(self.prefilled, self.cached, self.recomputed)
        return TurnDone(self.request, self.unreported, finish, usage)


class ReferenceEngine:
    """An engine worker; its factory path is `rollart.backends.engines.reference:ReferenceEngine`."""

    def __init__(self, settings: Mapping[str, Any], wake: Callable[[], None]) -> None:  # noqa: ARG002 - never waits
        self._settings = ReferenceEngineSettings.model_validate(dict(settings))
        self._model = build_model(self._settings.model, dtype=self._settings.dtype, device=self._settings.device)
        self._vocabulary = int(self._model.config.get_text_config().vocab_size)
        self._staging: Staging[Tensors] = Staging(self._settings.store, self._model.state_dict())
        self._version: Version | None = None
        self._sessions: dict[TrajectoryId, _Session] = {}
        self._running: deque[_Turn] = deque()
        self._queued: deque[_Turn] = deque()
        self._known: dict[RequestId, None] = {}
        self._suspended = False
        self._steps = 0
        self._report_at: float | None = None
        self._commands: deque[WorkerCommand] = deque()

    def info(self) -> EngineInfo:
        return EngineInfo(
            slots=self._settings.slots,
            max_context=self._settings.max_context,
            kv_on_update=KvOnUpdate.RECOMPUTE,
            sessions=True,
            progress_interval_s=self._settings.progress_interval_s,
        )

    def post(self, commands: Sequence[WorkerCommand]) -> None:
        self._commands.extend(commands)

    def advance(self, now: float) -> Advance:
        events: list[WorkerEvent] = []
        while self._commands:
            self._obey(self._commands.popleft(), events)
        if self._staging.due:
            staged = self._staging.slice()
            if staged is not None:
                events.append(staged)
        if self._active():
            self._step(events)
        self._report(now, events)
        return Advance(events, now if self._active() or self._staging.due else None)

    def close(self) -> None:
        self._running.clear()
        self._queued.clear()
        self._sessions.clear()

    def _active(self) -> bool:
        return bool(self._running or self._queued) and not self._suspended

    # --- commands

    def _obey(self, command: WorkerCommand, events: list[WorkerEvent]) -> None:
        match command:
            case Add():
                self._add(command, events)
            case Abort(request):
                self._abort(lambda turn: turn.request == request, events)
            case EndSession(session):
                self._abort(lambda turn: turn.session_id == session, events)
                self._sessions.pop(session, None)
            case Suspend():
                self._suspended = True
            case Resume():
                self._suspended = False
            case Stage(manifest):
                self._stage(manifest, events)
            case Update(version):
                events.append(self._update(version))
            case _:
                raise InvariantBroken(f"an engine does not take {type(command).__name__}; this is a bug of rollart")

    def _add(self, add: Add, events: list[WorkerEvent]) -> None:
        if add.request in self._known:
            return
        session = self._sessions.get(add.session)
        if add.prefix_length and (session is None or not session.holds(add.prefix_length, add.prefix_digest)):
            # Not remembered: the same request comes again with the whole.
            events.append(PrefixMiss(add.request))
            return
        problem = self._problem(add)
        if problem:
            events.append(Refused(add.request, problem))
            return
        # One turn per session: the controller has moved on from an older one.
        self._abort(lambda turn: turn.session_id == add.session, events)
        if session is None or not add.prefix_length:
            session = self._sessions[add.session] = _Session()
        session.cut(add.prefix_length)
        session.tokens += add.new.ids().tobytes()
        self._remember(add.request)
        self._queued.append(_Turn(add, session))

    def _problem(self, add: Add) -> str:
        """Why the request can never be served here; empty if it can."""
        if self._version is None:
            return "this engine has no weights yet: stage and update it first"
        if add.sampling.max_tokens < 1 or not 0 <= add.sampling.temperature < float("inf"):
            return f"cannot sample {add.sampling.max_tokens} tokens at temperature {add.sampling.temperature:g}"
        if not add.sampling.is_plain:
            return "top-p, top-k or stop strings, which the reference engine does not do; use the torch engine"
        length = add.prefix_length + add.new.length
        if not 0 < length < self._settings.max_context:
            return f"a context of {length} tokens, but this engine takes 1 to {self._settings.max_context - 1}"
        if add.new.payload is None:
            return "a simulated segment, but this engine needs tokens"
        new = add.new.ids()
        if new.size and not (new.min() >= 0 and new.max() < self._vocabulary):
            return f"tokens from {new.min()} to {new.max()}, but the vocabulary has {self._vocabulary}: check the codec"
        return ""

    def _abort(self, which: Callable[[_Turn], bool], events: list[WorkerEvent]) -> None:
        for turns in (self._running, self._queued):
            for turn in [turn for turn in turns if which(turn)]:
                turns.remove(turn)
                events.append(turn.done(FinishReason.ABORTED))

    def _remember(self, request: RequestId) -> None:
        self._known[request] = None
        if len(self._known) > REMEMBERED_REQUESTS:
            del self._known[next(iter(self._known))]

    # --- weights

    def _stage(self, manifest: Manifest, events: list[WorkerEvent]) -> None:
        version = manifest.version
        if version == self._version:
            events.append(Staged(version))
        elif self._version is not None and version < self._version:
            events.append(StageFailed(version, f"{self._version} is in service; versions only grow"))
        else:
            said = self._staging.begin(manifest)
            if said is not None:
                events.append(said)

    def _update(self, version: Version) -> Updated | StageFailed:
        if version == self._version:
            return Updated(version)
        if self._version is not None and version < self._version:
            return StageFailed(version, f"{self._version} is in service; versions only grow")
        tensors = self._staging.take(version)
        if tensors is None:
            return StageFailed(version, f"{version} is not staged here; stage it and wait for Staged")
        self._model.load_state_dict(tensors)
        self._version = version
        return Updated(version)

    # --- generation

    def _step(self, events: list[WorkerEvent]) -> None:
        """One chunk of the request whose turn it is."""
        while self._queued and len(self._running) < self._settings.slots:
            self._running.append(self._queued.popleft())
        turn = self._running.popleft()
        version, session = self._version, turn.session
        assert version is not None  # no request is taken before there are weights
        turn.count(version)
        room = min(turn.sampling.max_tokens - turn.sampled, self._settings.max_context - session.length)
        tokens, logprobs = sample_chunk(
            self._model, session.ids(), turn.sampling, min(room, self._settings.chunk_tokens)
        )
        session.tokens += tokens.tobytes()
        session.computed, session.computed_with = session.length, version
        chunk = Generated(Segment.of(tokens), logprobs.tobytes(), (VersionRun(version, tokens.size),))
        turn.unreported = turn.unreported.then(chunk)
        turn.sampled += tokens.size
        self._steps += 1
        if int(tokens[-1]) in turn.sampling.stop_tokens:
            events.append(turn.done(FinishReason.STOP))
        elif tokens.size == room:
            events.append(turn.done(FinishReason.LENGTH))
        else:
            self._running.append(turn)

    def _report(self, now: float, events: list[WorkerEvent]) -> None:
        """Twice as often as promised, because a chunk takes its time."""
        if not self._active():
            self._report_at = None
            return
        if self._report_at is None:
            self._report_at = now + self._settings.progress_interval_s / 2
        if now < self._report_at:
            return
        self._report_at = now + self._settings.progress_interval_s / 2
        parts = []
        for turn in self._running:
            if turn.unreported.tokens.length:
                parts.append((turn.request, turn.unreported))
                turn.unreported = NOTHING
        events.append(Progress(tuple(parts), self._steps))
        self._steps = 0
