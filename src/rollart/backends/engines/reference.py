"""The reference engine: a `transformers` model, one request at a time, simple enough to be obviously correct.

`generate` cannot be interrupted, so a turn is sampled in chunks: one step is one chunk of one request, round-robin. The
prefix is recomputed for every chunk; `TurnUsage` is what an engine with a KV cache per session would have computed.

Invariants, besides those of `shell`: a token carries the version that was in service in the chunk that sampled it.
"""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import Field

from rollart.backends.engines.sampling import sample_chunk
from rollart.backends.engines.sessions import Sessions, Turn, VersionedSession
from rollart.backends.engines.shell import EngineSettings
from rollart.backends.engines.staging import Staging, Tensors
from rollart.backends.engines.stepped_engine import SteppedEngine
from rollart.backends.models import build_model
from rollart.types.messages import Add, FinishReason, KvOnUpdate, Sampling, TurnDone
from rollart.types.tokens import VersionRun
from rollart.types.versions import Version


class ReferenceEngineSettings(EngineSettings):
    """Settings of the reference engine."""

    chunk_tokens: int = Field(default=8, ge=1)
    """Tokens sampled per step."""


class ReferenceTurn(Turn):
    session: VersionedSession
    __slots__ = ("_started",)

    def __init__(self, add: Add, session: VersionedSession) -> None:
        super().__init__(add, session)
        self._started = False

    def count(self, version: Version) -> None:
        """Count the KV needed for the next step as cached, invalidated or new."""
        session = self.session
        if session.computed_with != version:
            self.recomputed += session.computed
        elif not self._started:
            self.cached += session.computed
        if not self._started:
            self.prefilled += session.length - session.computed
        self._started = True


class ReferenceEngine(SteppedEngine[VersionedSession, ReferenceTurn, Tensors]):
    """An engine worker; its factory path is `rollart.backends.engines.reference:ReferenceEngine`."""

    def __init__(self, settings: Mapping[str, Any], wake: Callable[[], None]) -> None:  # noqa: ARG002 - never waits
        own = self._settings = ReferenceEngineSettings.model_validate(dict(settings))
        self._model = build_model(own.model, dtype=own.pool.dtype, device=own.pool.device)
        self._running: deque[ReferenceTurn] = deque()
        self._queued: deque[ReferenceTurn] = deque()
        super().__init__(
            own.info(KvOnUpdate.RECOMPUTE),
            Sessions(VersionedSession),
            Staging(own.store, self._model.state_dict()),
            vocabulary=int(self._model.config.get_text_config().vocab_size),
        )

    def _refuses(self, sampling: Sampling) -> str:
        if not sampling.is_plain:
            return "top-p, top-k or stop strings, which the reference engine does not support; use the torch engine"
        return ""

    def _start(self, add: Add, session: VersionedSession) -> ReferenceTurn:
        turn = ReferenceTurn(add, session)
        self._queued.append(turn)
        return turn

    def _abort(self, turn: ReferenceTurn) -> TurnDone:
        (self._running if turn in self._running else self._queued).remove(turn)
        return turn.done(FinishReason.ABORTED)

    def _swap(self, version: Version) -> bool:
        self._model.load_state_dict(self._staging.take(version))
        return True

    def _step(self) -> list[TurnDone]:
        """Sample one chunk of the next request."""
        while self._queued and len(self._running) < self._settings.pool.slots:
            self._running.append(self._queued.popleft())
        turn = self._running.popleft()
        version, session = self._version, turn.session
        assert version is not None  # requests are refused before there are weights
        turn.count(version)
        room = min(turn.sampling.max_tokens - turn.sampled, self._settings.max_context - session.length)
        limit = min(room, self._settings.chunk_tokens)
        tokens, logprobs = sample_chunk(self._model, session.tokens(), turn.sampling, limit)
        turn.take(tokens.tolist(), logprobs.tolist(), [VersionRun(version, tokens.size)])
        session.mark_computed(version)
        if int(tokens[-1]) in turn.sampling.stop_tokens:
            return [turn.done(FinishReason.STOP)]
        if tokens.size == room:
            return [turn.done(FinishReason.LENGTH)]
        self._running.append(turn)
        return []
