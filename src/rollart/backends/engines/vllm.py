"""The vLLM engine: vLLM's `AsyncLLM` as an engine worker.

vLLM runs in its own processes and decides what to batch (`vllm_core`). This process holds the tokens of every session,
so that a turn carries only new tokens. vLLM keeps or evicts KV on its own: how much of a prefix was found in its cache,
in whole blocks, is reported as `TurnUsage.cached`. `EndSession` frees the tokens here; their KV is evicted when others
need the memory.

Invariants, besides those of `shell`:
- a token carries the version that the engine core had when it sampled it, and every rank had verified that version;
- a log-probability is that of the full softmax at the request's temperature, in the dtype that the model computes in;
- `Progress` is reported only while the engine core answers: a core that hangs is silent.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from rollart.backends.engines.sampling import seed_at
from rollart.backends.engines.sessions import Sessions, Turn, VersionedSession
from rollart.backends.engines.shell import EngineSettings, EngineShell, Reported, Steps
from rollart.backends.engines.vllm_core import Alive, Broken, CoreEvent, Ended, Loaded, Sampled, VllmCore
from rollart.ports.worker import Advance
from rollart.types.errors import EngineFault, RequestError
from rollart.types.ids import RequestId
from rollart.types.messages import (
    Add,
    FinishReason,
    KvOnUpdate,
    Refused,
    Sampling,
    Staged,
    StageFailed,
    Updated,
    WorkerEvent,
)
from rollart.types.versions import Version
from rollart.types.weights import Manifest

COLDEST = 0.01
"""Lowest non-zero temperature of vLLM, which raises lower ones to this."""
FINISHES = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORTED}


class VllmEngineSettings(EngineSettings):
    """vLLM's ranks read `store` directly if it can be pickled; otherwise versions are copied to a folder."""

    model: str
    """Folder with a config.json; a tokenizer.json there enables stop strings. Its weights are not read."""

    def vllm_arguments(self) -> dict[str, Any]:
        folder = Path(self.model)
        if not (folder / "config.json").is_file():
            raise RequestError(f"model {self.model!r} is not a folder with a config.json; give a local checkpoint")
        return {
            "model": self.model,
            "skip_tokenizer_init": not (folder / "tokenizer.json").is_file(),
            "dtype": self.pool.dtype,
            "max_model_len": self.max_context,
            "max_num_seqs": self.pool.slots,
        } | self.pool.vllm


class VllmTurn(Turn):
    """A request in flight, which may still sample after it was superseded."""

    __slots__ = ("_version",)
    session: VersionedSession

    def __init__(self, add: Add, session: VersionedSession) -> None:
        super().__init__(add, session)
        self._version: Version | None = None
        """Version of its last token."""

    def extend(self, sampled: Sampled, *, recompute: bool) -> None:
        """Append sampled tokens; when their version changes, count the KV that had to be recomputed."""
        count = self.sampled
        for run in sampled.runs:
            if self._version is None:
                self._begin(sampled.cached, run.version, recompute=recompute)
            elif run.version != self._version and recompute:
                self.recomputed += self.prompt_length + count - 1
            self._version = run.version
            count += run.length
        self.take(sampled.tokens, sampled.logprobs, sampled.runs)
        if self.is_current and self._version is not None:
            self.session.mark_computed(self._version)

    def _begin(self, cached: int, version: Version, *, recompute: bool) -> None:
        session = self.session
        void = 0
        if recompute and self.is_current and session.computed_with != version:
            void = max(0, session.computed - cached)
        self.cached, self.recomputed, self.prefilled = cached, void, self.prompt_length - cached - void


class VllmEngine(EngineShell[VersionedSession, VllmTurn]):
    """An engine worker; its factory path is `rollart.backends.engines.vllm:VllmEngine`.

    `start` returns the core for the settings; tests pass one that is running already.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        wake: Callable[[], None],
        start: Callable[[VllmEngineSettings], VllmCore] | None = None,
    ) -> None:
        own = self._settings = VllmEngineSettings.model_validate(dict(settings))
        self._recompute = own.pool.kv_on_update is KvOnUpdate.RECOMPUTE
        self._wake = wake
        self._core_events: SimpleQueue[CoreEvent] = SimpleQueue()
        self._alive = False
        """Whether the core has answered since the last report."""
        self._core = (start or _start)(own)
        super().__init__(own.info(own.pool.kv_on_update), Sessions(VersionedSession), vocabulary=self._core.vocabulary)
        self._steps = self._core.steps
        self._core.listen(self._on_core_event)

    def advance(self, now: float) -> Advance:
        events: list[WorkerEvent] = []
        self._note(self._handle_core_events(), events)
        self._obey_commands(events)
        self._report(now, events)
        return Advance(events, self._report_at)

    def close(self) -> None:
        super().close()
        self._core.close()

    # --- what the core reports

    def _on_core_event(self, event: CoreEvent) -> None:
        """Called in the core's thread. Tokens do not wake the worker: they wait for the next report."""
        self._core_events.put(event)
        if not isinstance(event, Sampled | Alive):
            self._wake()

    def _handle_core_events(self) -> Iterator[Reported]:
        while True:
            try:
                event = self._core_events.get_nowait()
            except Empty:
                return
            self._alive = True
            match event:
                case Sampled():
                    self._turns[RequestId(int(event.request))].extend(event, recompute=self._recompute)
                case Ended():
                    yield self._ended(event)
                case Loaded(version):
                    yield Updated(version)
                case Staged() | StageFailed():
                    yield event
                case Broken(error):
                    raise EngineFault(f"vLLM failed: {type(error).__name__}: {error}. Restart the engine.") from error

    def _ended(self, ended: Ended) -> Reported:
        turn = self._turns[RequestId(int(ended.request))]
        if ended.refused:
            return Refused(turn.request, f"vLLM rejects it: {ended.refused}")
        return turn.done(FINISHES[ended.reason])

    # --- turns and weights

    def _refuses(self, sampling: Sampling) -> str:
        if 0 < sampling.temperature < COLDEST:
            return f"vLLM samples at temperature 0 or at {COLDEST:g} and above, not at {sampling.temperature:g}"
        if sampling.top_p < 1 or sampling.top_k:
            return "vLLM reports log-probabilities among top-p and top-k tokens only; leave both off"
        if sampling.stop_strings and not self._core.tokenizer:
            return f"stop strings need a tokenizer.json in {self._settings.model}"
        return ""

    def _start(self, add: Add, session: VersionedSession) -> VllmTurn:
        seed = seed_at(add.sampling.seed, session.length)
        self._core.add(str(add.request), session.tokens().tolist(), add.sampling, seed)
        return VllmTurn(add, session)

    def _abort(self, turn: VllmTurn) -> None:
        self._core.abort(str(turn.request))

    def _suspend(self) -> None:
        self._core.suspend()

    def _resume(self) -> None:
        self._core.resume()

    def _fetch(self, manifest: Manifest) -> None:
        self._core.stage(manifest, self._settings.store)

    def _swap(self, version: Version) -> bool:
        self._core.load(version, recompute=self._recompute)
        return False

    # --- reports

    def _report(self, now: float, events: list[WorkerEvent]) -> None:
        """Report. After a pause, only a whole interval later: earlier answers of the core are no sign of life."""
        if not self._active():
            self._report_at = None
        elif self._report_at is None:
            self._probe()
        super()._report(now, events)

    def _steps_taken(self) -> Steps | None:
        alive = self._alive
        self._probe()
        if not alive:
            return None
        steps, self._steps = self._core.steps - self._steps, self._core.steps
        return Steps(steps)

    def _probe(self) -> None:
        self._alive = False
        self._core.probe()


def _start(settings: VllmEngineSettings) -> VllmCore:
    return VllmCore(settings.vllm_arguments())
