"""The vLLM engine: `AsyncLLM` behind the Worker port.

vLLM runs in processes of its own and decides what to batch; this adapter keeps what the controller counts on. It holds
the tokens of every session, so that a turn needs to carry only what is new. Their KV is vLLM's to keep or evict: what
of a prefix was still there, in whole blocks of its cache, is told as `TurnUsage.cached`, and `EndSession` frees the
tokens while the KV leaves with time.

What holds:
- every `Add` that is not a double is answered by exactly one of `TurnDone`, `PrefixMiss`, `Refused`;
- a token carries the version that the engine core had when it sampled it, and every rank had verified that version;
- a log-probability is that of the full softmax at the request's temperature, in what dtype the model computes;
- a session holds exactly the tokens that the controller sent and was sent, in order;
- `Progress` is reported only while the engine core answers: a core that hangs is silent.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field

from rollart.backends.engines.vllm_core import Alive, Broken, Ended, Loaded, Said, Sampled, VllmCore
from rollart.config.base import Strict
from rollart.ports.worker import Advance
from rollart.types.errors import EngineFault, InvariantBroken, RequestError
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
from rollart.types.tokens import LOGPROB, NOTHING, TOKEN, Generated, Segment, prefix_digest
from rollart.types.versions import Version
from rollart.types.weights import Manifest

REMEMBERED_REQUESTS = 65_536
"""Of so many requests a doubled `Add` is recognised."""
COLDEST = 0.01
"""vLLM raises a lower temperature to this one, unless it is 0."""
FINISHES = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORTED}


class VllmEngineSettings(Strict):
    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    model: str
    """A folder with a config.json; a tokenizer there allows stop strings. Weights are not read from it."""
    store: Any
    """A `WeightStore`; all weights come from it. Ranks read it themselves if it can be pickled."""
    slots: int = Field(default=64, ge=1)
    max_context: int = Field(default=4096, ge=2)
    dtype: str = "bfloat16"
    kv_on_update: Literal["recompute", "keep"] = "recompute"
    progress_interval_s: float = Field(default=5.0, gt=0)
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's `AsyncEngineArgs`, such as `tensor_parallel_size` or `gpu_memory_utilization`."""

    def vllm_arguments(self) -> dict[str, Any]:
        folder = Path(self.model)
        if not (folder / "config.json").is_file():
            raise RequestError(f"model {self.model!r} is no folder with a config.json; give a local checkpoint")
        return {
            "model": self.model,
            "skip_tokenizer_init": not (folder / "tokenizer.json").is_file(),
            "dtype": self.dtype,
            "max_model_len": self.max_context,
            "max_num_seqs": self.slots,
        } | self.arguments


class _Session:
    """The tokens of a trajectory, of how many of them KV was computed at its last turn, and with which version."""

    def __init__(self) -> None:
        self.tokens = bytearray()
        self.computed = 0
        self.computed_with: Version | None = None

    @property
    def length(self) -> int:
        return len(self.tokens) // TOKEN.itemsize

    def ids(self) -> NDArray[np.int32]:
        return np.frombuffer(bytes(self.tokens), dtype=TOKEN)

    def holds(self, length: int, digest: bytes) -> bool:
        return length <= self.length and prefix_digest(bytes(self.tokens[: length * TOKEN.itemsize])) == digest

    def extend(self, length: int, new: bytes) -> None:
        """What follows the first `length` tokens is `new`."""
        self.tokens[length * TOKEN.itemsize :] = new
        self.computed = min(self.computed, length)


class _Turn:
    """A request in flight."""

    def __init__(self, add: Add, session: _Session) -> None:
        self.request: RequestId = add.request
        self.session_id: TrajectoryId = add.session
        self.session: _Session | None = session
        """None once the session has gone on without this turn."""
        self.prompt = session.length
        self.sampled = 0
        self.version: Version | None = None
        """Of its last token."""
        self.unreported: Generated = NOTHING
        self.prefilled = 0
        self.cached = 0
        self.recomputed = 0

    def take(self, said: Sampled, *, recompute: bool) -> None:
        """Tokens that were sampled; what of the KV under them had to be computed again is counted where it changed."""
        for run in said.runs:
            if self.version is None:
                self._begin(said.cached, run.version, recompute=recompute)
            elif run.version != self.version and recompute:
                self.recomputed += self.prompt + self.sampled - 1
            self.version = run.version
            self.sampled += run.length
        tokens = np.array(said.tokens, dtype=TOKEN).tobytes()
        logprobs = np.array(said.logprobs, dtype=LOGPROB).tobytes()
        self.unreported = self.unreported.then(Generated(Segment(len(said.tokens), tokens), logprobs, said.runs))
        if self.session is not None:
            self.session.tokens += tokens
            self.session.computed, self.session.computed_with = self.session.length, self.version

    def _begin(self, cached: int, version: Version, *, recompute: bool) -> None:
        session = self.session
        void = 0
        if recompute and session is not None and session.computed_with != version:
            void = max(0, session.computed - cached)
        self.cached, self.recomputed, self.prefilled = cached, void, self.prompt - cached - void

    def done(self, finish: FinishReason) -> TurnDone:
        return TurnDone(self.request, self.unreported, finish, TurnUsage(self.prefilled, self.cached, self.recomputed))


class VllmEngine:
    """An engine worker; its factory path is `rollart.backends.engines.vllm:VllmEngine`.

    `start` gives the core for the settings: a new one, unless a test has one to spare.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        wake: Callable[[], None],
        start: Callable[[VllmEngineSettings], VllmCore] | None = None,
    ) -> None:
        self._settings = VllmEngineSettings.model_validate(dict(settings))
        self._recompute = self._settings.kv_on_update == "recompute"
        self._wake = wake
        self._said: SimpleQueue[Said] = SimpleQueue()
        self._version: Version | None = None
        self._staged: dict[Version, bool] = {}
        """Versions beside the one in service: True when ready, False while they are fetched."""
        self._loading: Version | None = None
        self._sessions: dict[TrajectoryId, _Session] = {}
        self._turns: dict[RequestId, _Turn] = {}
        self._known: dict[RequestId, None] = {}
        self._suspended = False
        self._alive = False
        """Whether anything was heard of the core since the last report."""
        self._report_at: float | None = None
        self._commands: deque[WorkerCommand] = deque()
        self._core = (start or _start)(self._settings)
        self._steps = self._core.steps
        self._core.listen(self._hear)

    def info(self) -> EngineInfo:
        return EngineInfo(
            slots=self._settings.slots,
            max_context=self._settings.max_context,
            kv_on_update=KvOnUpdate(self._settings.kv_on_update),
            sessions=True,
            progress_interval_s=self._settings.progress_interval_s,
        )

    def post(self, commands: Sequence[WorkerCommand]) -> None:
        self._commands.extend(commands)

    def advance(self, now: float) -> Advance:
        events: list[WorkerEvent] = []
        self._note(events)
        while self._commands and not self._must_wait(self._commands[0]):
            self._obey(self._commands.popleft(), events)
        self._report(now, events)
        return Advance(events, self._report_at)

    def close(self) -> None:
        self._core.close()

    # --- what the core says

    def _hear(self, said: Said) -> None:
        """In the core's thread. Tokens are no reason to wake: they are told with the next report."""
        self._said.put(said)
        if not isinstance(said, Sampled | Alive):
            self._wake()

    def _note(self, events: list[WorkerEvent]) -> None:
        while True:
            try:
                said = self._said.get_nowait()
            except Empty:
                return
            self._alive = True
            match said:
                case Sampled():
                    self._turns[RequestId(int(said.request))].take(said, recompute=self._recompute)
                case Ended():
                    events.append(self._end(said))
                case Loaded(version):
                    self._version, self._loading = version, None
                    self._staged = {other: ready for other, ready in self._staged.items() if other > version}
                    events.append(Updated(version))
                case Staged(version):
                    self._staged[version] = True
                    events.append(said)
                case StageFailed(version):
                    self._staged.pop(version, None)
                    events.append(said)
                case Broken(error):
                    raise EngineFault(
                        f"vLLM failed: {type(error).__name__}: {error}. Start the engine anew."
                    ) from error

    def _end(self, ended: Ended) -> WorkerEvent:
        turn = self._turns.pop(RequestId(int(ended.request)))
        if ended.refused:
            return Refused(turn.request, f"vLLM does not take it: {ended.refused}")
        return turn.done(FINISHES[ended.reason])

    # --- commands

    def _must_wait(self, command: WorkerCommand) -> bool:
        """Commands take effect in their order: what depends on the version waits until the one that comes is there."""
        return self._loading is not None and isinstance(command, Stage | Update)

    def _obey(self, command: WorkerCommand, events: list[WorkerEvent]) -> None:
        match command:
            case Add():
                self._add(command, events)
            case Abort(request):
                if request in self._turns:
                    self._core.abort(str(request))
            case EndSession(session):
                self._leave(session)
                self._sessions.pop(session, None)
            case Suspend():
                self._suspended = True
                self._core.suspend()
            case Resume():
                self._suspended = False
                self._core.resume()
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
            # Not remembered: the same request comes again with the whole.
            events.append(PrefixMiss(add.request))
            return
        problem = self._problem(add)
        if problem:
            events.append(Refused(add.request, problem))
            return
        # One turn per session: the controller has moved on from an older one.
        self._leave(add.session)
        if session is None or not add.prefix_length:
            session = self._sessions[add.session] = _Session()
        session.extend(add.prefix_length, add.new.ids().tobytes())
        self._remember(add.request)
        self._turns[add.request] = _Turn(add, session)
        self._core.add(str(add.request), session.ids().tolist(), add.sampling, _seed(add.sampling.seed, session.length))

    def _problem(self, add: Add) -> str:
        """Why the request can never be served here; empty if it can."""
        sampling = add.sampling
        if self._version is None and self._loading is None:
            return "this engine has no weights yet: stage and update it first"
        if sampling.max_tokens < 1 or not 0 <= sampling.temperature < float("inf"):
            return f"cannot sample {sampling.max_tokens} tokens at temperature {sampling.temperature:g}"
        if 0 < sampling.temperature < COLDEST:
            return f"vLLM samples at temperature 0 or at {COLDEST:g} and above, not at {sampling.temperature:g}"
        if sampling.top_p < 1 or sampling.top_k:
            return "vLLM tells the log-probability among top-p and top-k tokens alone; leave both off"
        if sampling.stop_strings and not self._core.tokenizer:
            return f"stop strings need a tokenizer.json in {self._settings.model}"
        length = add.prefix_length + add.new.length
        if not 0 < length < self._settings.max_context:
            return f"a context of {length} tokens, but this engine takes 1 to {self._settings.max_context - 1}"
        if add.new.payload is None:
            return "a simulated segment, but this engine needs tokens"
        new, vocabulary = add.new.ids(), self._core.vocabulary
        if new.size and not (new.min() >= 0 and new.max() < vocabulary):
            return f"tokens from {new.min()} to {new.max()}, but the vocabulary has {vocabulary}: check the codec"
        return ""

    def _leave(self, session: TrajectoryId) -> None:
        """Abort what runs for a session; its tokens are told of, and are no longer the session's."""
        for turn in self._turns.values():
            if turn.session_id == session and turn.session is not None:
                turn.session = None
                self._core.abort(str(turn.request))

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
        elif version not in self._staged:
            self._staged[version] = False
            self._core.stage(manifest, self._settings.store)
        elif self._staged[version]:
            events.append(Staged(version))

    def _update(self, version: Version, events: list[WorkerEvent]) -> None:
        if version == self._version:
            events.append(Updated(version))
        elif self._version is not None and version < self._version:
            events.append(StageFailed(version, f"{self._version} is in service; versions only grow"))
        elif not self._staged.get(version):
            events.append(StageFailed(version, f"{version} is not staged here; stage it and wait for Staged"))
        else:
            self._loading = version
            self._core.load(version, recompute=self._recompute)

    # --- reports

    def _report(self, now: float, events: list[WorkerEvent]) -> None:
        """Twice as often as promised, because a step takes its time."""
        if not self._turns or self._suspended:
            self._report_at = None
            return
        if self._report_at is not None and now < self._report_at:
            return
        if self._report_at is not None and self._alive:
            parts = tuple(
                (turn.request, turn.unreported) for turn in self._turns.values() if turn.unreported.tokens.length
            )
            for turn in self._turns.values():
                turn.unreported = NOTHING
            steps, self._steps = self._core.steps - self._steps, self._core.steps
            events.append(Progress(parts, steps))
        self._alive = False
        self._core.probe()
        self._report_at = now + self._settings.progress_interval_s / 2


def _start(settings: VllmEngineSettings) -> VllmCore:
    return VllmCore(settings.vllm_arguments())


def _seed(seed: int, position: int) -> int:
    """Of a turn: another for every position, so that a turn that goes on elsewhere does not repeat its draws."""
    digest = hashlib.blake2b(f"{seed}/{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # torch takes 63 bits
