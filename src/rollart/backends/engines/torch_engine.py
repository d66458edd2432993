"""The torch engine: continuous batching on plain PyTorch, for the model families of `checkpoint_config`.

One `advance` is one step: a token for every request that decodes, and up to `prefill_tokens` tokens of prompts beside
them, in one forward pass. Commands act between two steps.

    Add ──► queue ──► (a slot, and KV memory for all it may need) ──► running ──► TurnDone
                                                                        │  ▲
                        Update: KV is void, computed again in chunks ◄──┘  └── a token per step, with its version

What holds:
- every `Add` that is not a double is answered by exactly one of `TurnDone`, `PrefixMiss`, `Refused`;
- a token carries the version that was in service in the step that sampled it, and that version was verified;
- what a request gives does not depend on what else runs (see `token_sampling`);
- KV memory is fixed when the engine starts; who finds no room waits, who runs keeps what it has.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from pydantic import ConfigDict, Field

from rollart.backends.engines.checkpoint_config import read_shape
from rollart.backends.engines.checkpoint_tensors import load_tensors
from rollart.backends.engines.counters import EngineCounters
from rollart.backends.engines.decoder import Decoder
from rollart.backends.engines.kv import KvArena
from rollart.backends.engines.planning import Work, plan_step
from rollart.backends.engines.session_cache import SessionCache
from rollart.backends.engines.sessions import Turn
from rollart.backends.engines.staging import Staging
from rollart.backends.engines.stop_strings import StopStrings
from rollart.backends.engines.token_sampling import sample
from rollart.backends.engines.weights import ModelWeights, prepare, prepare_now, wanted_tensors
from rollart.config.base import Strict
from rollart.ports.worker import Advance
from rollart.types.errors import InvariantBroken, RequestError
from rollart.types.ids import RequestId
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
    Update,
    Updated,
    WorkerCommand,
    WorkerEvent,
)
from rollart.types.versions import Version
from rollart.types.weights import Manifest

REMEMBERED_REQUESTS = 65_536
"""Of so many requests a doubled `Add` is recognised."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class TorchEngineSettings(Strict):
    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    model: str | dict[str, Any]
    store: Any
    """A `WeightStore`; versions come from it."""
    serve_folder_as: tuple[int, int] | None = None
    """Serve the folder's own weights from the start, as this (epoch, step); None: wait for the first update."""
    slots: int = Field(default=64, ge=1)
    max_context: int = Field(default=1024, ge=2)
    """At most what the KV memory can hold."""
    kv_mib: float = Field(default=1024.0, gt=0)
    prefill_tokens: int = Field(default=256, ge=1)
    """Of prompts, in one step: more is quicker to the first token, fewer keeps decoding steadier."""
    kv_on_update: KvOnUpdate = KvOnUpdate.RECOMPUTE
    dtype: str = "float32"
    device: str = "cpu"
    progress_interval_s: float = Field(default=5.0, gt=0)


class TorchEngine:
    """An engine worker; its factory path is `rollart.backends.engines.torch_engine:TorchEngine`."""

    def __init__(self, settings: Mapping[str, Any], wake: Callable[[], None]) -> None:
        # Per thread, and workers are built in theirs. More threads collapse as soon as two workers share the machine.
        torch.set_num_threads(1)
        own = self._settings = TorchEngineSettings.model_validate(dict(settings))
        if own.dtype not in DTYPES:
            raise RequestError(f"dtype {own.dtype!r} is not served; use {' or '.join(DTYPES)}")
        self._dtype, self._device = DTYPES[own.dtype], torch.device(own.device)
        self._shape = read_shape(own.model)
        arena = KvArena(self._shape, budget_bytes=int(own.kv_mib * 2**20), dtype=self._dtype, device=self._device)
        self._max_context = min(own.max_context, arena.largest_tokens)
        self._decoder = Decoder(self._shape, dtype=self._dtype, device=self._device, max_context=self._max_context)
        self._cache = SessionCache(arena)
        self._stop_strings = StopStrings.of(own.model)
        self._staging: Staging[ModelWeights] = Staging(
            own.store,
            wanted_tensors(self._shape, self._dtype),
            lambda tensors: prepare(tensors, self._shape, dtype=self._dtype, device=self._device),
            wake=wake,
        )
        self._weights: ModelWeights | None = None
        self._version: Version | None = None
        if own.serve_folder_as is not None:
            self._weights = self._folder_weights()
            self._version = Version(*own.serve_folder_as)
        self._running: dict[RequestId, Turn] = {}
        self._queued: dict[RequestId, Turn] = {}
        self._known: dict[RequestId, None] = {}
        self._started = 0
        self._suspended = False
        self._steps = 0
        self._stepping_s = 0.0
        self._recompute_s = 0.0
        """Since the last report."""
        self._report_at: float | None = None
        self._commands: deque[WorkerCommand] = deque()
        self._counters = EngineCounters()

    # --- the Worker port

    def info(self) -> EngineInfo:
        return EngineInfo(
            slots=self._settings.slots,
            max_context=self._max_context,
            kv_on_update=self._settings.kv_on_update,
            sessions=True,
            progress_interval_s=self._settings.progress_interval_s,
        )

    def post(self, commands: Sequence[WorkerCommand]) -> None:
        self._commands.extend(commands)

    def advance(self, now: float) -> Advance:
        events: list[WorkerEvent] = []
        began = time.perf_counter()
        while self._commands:
            self._obey(self._commands.popleft(), events)
        obeyed = time.perf_counter()
        # After the commands, so that what is to be fetched is on its way during the step.
        staged = self._staging.slice() if self._staging.due else None
        if staged is not None:
            # Told before the step and not after it: training may be waiting for it.
            events.append(staged)
        elif self._active():
            began += time.perf_counter() - obeyed
            self._step(events)
            self._stepping_s += time.perf_counter() - began
        self._report(now, events)
        return Advance(events, now if self._active() or self._staging.due else None)

    def close(self) -> None:
        self._running.clear()
        self._queued.clear()
        self._cache.close()
        self._staging.close()
        self._weights = None

    # --- what an operator, and the tests, look at

    def counters(self) -> EngineCounters:
        """A copy of what was counted so far."""
        self._counters.evicted_sessions = self._cache.evicted
        tasks = {name: msgspec.structs.replace(task) for name, task in self._counters.tasks.items()}
        return msgspec.structs.replace(self._counters, tasks=tasks)

    def check(self) -> None:
        """Raise `InvariantBroken` unless KV memory, sessions and requests agree."""
        self._cache.check()

    @property
    def kv_tokens_used(self) -> int:
        """KV memory that sessions have blocks of."""
        return self._cache.arena.used_tokens

    # --- commands

    def _active(self) -> bool:
        return bool(self._running or self._queued) and not self._suspended

    def _obey(self, command: WorkerCommand, events: list[WorkerEvent]) -> None:
        match command:
            case Add():
                self._add(command, events)
            case Abort(request):
                self._abort(self._running.get(request) or self._queued.get(request), events)
            case EndSession(id):
                session = self._cache.get(id)
                if session is not None:
                    self._abort(session.turn, events)
                    self._cache.drop(id)
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
        session = self._cache.get(add.session)
        if add.prefix_length and (session is None or not session.holds(add.prefix_length, add.prefix_digest)):
            # Not remembered: the same request comes again with the whole.
            self._counters.prefix_misses += 1
            events.append(PrefixMiss(add.request))
            return
        problem = self._problem(add)
        if problem:
            events.append(Refused(add.request, problem))
            return
        if session is not None:
            # One turn per session: the controller has moved on from an older one.
            older, session.turn = session.turn, None
            self._end(older, FinishReason.ABORTED, events)
        if session is None or not add.prefix_length:
            session = self._cache.open(add.session)
        self._cache.cut(session, add.prefix_length)
        session.append(add.new.ids())
        turn = session.turn = Turn(add, session)
        self._cache.touch(session)
        self._remember(add.request)
        self._queued[add.request] = turn

    def _problem(self, add: Add) -> str:
        """Why the request can never be served here; empty if it can."""
        sampling = add.sampling
        if self._version is None:
            return "this engine has no weights yet: stage and update it first"
        if sampling.max_tokens < 1 or not 0 <= sampling.temperature < float("inf"):
            return f"cannot sample {sampling.max_tokens} tokens at temperature {sampling.temperature:g}"
        if not 0 < sampling.top_p <= 1 or sampling.top_k < 0:
            return f"top_p {sampling.top_p:g} and top_k {sampling.top_k}, but 0 < top_p <= 1 and top_k >= 0 can be"
        if sampling.stop_strings and self._stop_strings is None:
            return "stop strings, but the model has no tokenizer.json: serve a checkpoint folder that has one"
        length = add.prefix_length + add.new.length
        if not 0 < length < self._max_context:
            limit = "the KV memory" if self._max_context < self._settings.max_context else "its max_context"
            return f"a context of {length} tokens, but this engine takes 1 to {self._max_context - 1} by {limit}"
        if add.new.payload is None:
            return "a simulated segment, but this engine needs tokens"
        new = add.new.ids()
        vocabulary = self._shape.vocabulary
        if new.size and not (new.min() >= 0 and new.max() < vocabulary):
            return f"tokens from {new.min()} to {new.max()}, but the vocabulary has {vocabulary}: check the codec"
        return ""

    def _abort(self, turn: Turn | None, events: list[WorkerEvent]) -> None:
        if turn is not None:
            self._end(turn, FinishReason.ABORTED, events)
            self._cache.settle(turn.session)

    def _end(self, turn: Turn | None, finish: FinishReason, events: list[WorkerEvent]) -> None:
        if turn is not None:
            self._running.pop(turn.request, None)
            self._queued.pop(turn.request, None)
            events.append(turn.done(finish))

    def _remember(self, request: RequestId) -> None:
        self._known[request] = None
        if len(self._known) > REMEMBERED_REQUESTS:
            del self._known[next(iter(self._known))]

    # --- weights

    def _folder_weights(self) -> ModelWeights:
        if not isinstance(self._settings.model, str):
            raise RequestError("serve_folder_as needs a model that is a checkpoint folder; a config has no weights")
        tensors = load_tensors(Path(self._settings.model), self._shape)
        return prepare_now(tensors, self._shape, dtype=self._dtype, device=self._device)

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
        began = time.perf_counter()
        if version == self._version:
            return Updated(version)
        if self._version is not None and version < self._version:
            return StageFailed(version, f"{self._version} is in service; versions only grow")
        weights = self._staging.take(version)
        if weights is None:
            return StageFailed(version, f"{version} is not staged here; stage it and wait for Staged")
        self._weights = weights
        self._version = version
        if self._settings.kv_on_update is KvOnUpdate.RECOMPUTE:
            self._cache.void_all()
            for turn in self._running.values():
                turn.donor = None
                turn.seeks_donor = True
        self._counters.updates += 1
        self._counters.update_s += time.perf_counter() - began
        return Updated(version)

    # --- generation

    def _step(self, events: list[WorkerEvent]) -> None:
        began = time.perf_counter()
        self._admit()
        turns, work = self._choose()
        if self._weights is None or self._version is None:
            raise InvariantBroken("a request runs, but no version is in service")
        plan, outputs = plan_step(work, self._device)
        logits = self._decoder.forward(self._weights, self._cache.arena, plan)
        again = sum(self._computed(turn, item) for turn, item in zip(turns, work, strict=True))
        sampling = [turns[index] for index in outputs]
        if sampling:
            sampled = sample(logits, [turn.sampling for turn in sampling], [turn.session.length for turn in sampling])
            for turn, token, logprob in zip(sampling, sampled.tokens.tolist(), sampled.logprobs.tolist(), strict=True):
                turn.take_token(token, logprob, self._version)
                finish = self._finish(turn, token)
                if finish is not None:
                    self._end(turn, finish, events)
                    self._cache.settle(turn.session)
        self._steps += 1
        self._count(turns, work, again, time.perf_counter() - began)

    def _admit(self) -> None:
        """Start queued requests, first in, first out, while there are slots and KV memory."""
        while self._queued and len(self._running) < self._settings.slots:
            turn = next(iter(self._queued.values()))
            session = turn.session
            need = min(session.length + turn.sampling.max_tokens, self._max_context)
            if not self._cache.reserve(session, need, alone=not self._running):
                self._counters.stalled_steps += 1
                return
            del self._queued[turn.request]
            self._started += 1
            turn.number = self._started
            self._running[turn.request] = turn
            # The last token is computed in any case: its logits are wanted.
            session.computed = min(session.computed, session.length - 1)
            self._cache.share(session)
            turn.begin()
            self._counters.task(turn.task).cached_tokens += session.computed

    def _choose(self) -> tuple[list[Turn], list[Work]]:
        """Whose tokens this step computes: every request that decodes, and prompts in the order of their arrival."""
        turns, work = [], []
        room = self._settings.prefill_tokens
        for turn in self._running.values():
            session = turn.session
            if session.length - session.computed > 1 and (room < 1 or not self._shared(turn)):
                continue
            pending = session.length - session.computed
            count = 1 if pending == 1 else min(pending, room)
            if pending > 1:
                room -= count
            if session.block is None:
                raise InvariantBroken(f"session {session.id} runs without KV memory")
            tokens = session.tokens(session.computed, session.computed + count)
            turns.append(turn)
            work.append(Work(session.block, session.computed, tokens, count == pending))
        return turns, work

    def _shared(self, turn: Turn) -> bool:
        """Take what another session has computed of this prompt; False if it is computing it now."""
        if turn.seeks_donor:
            self._cache.find_donor(turn)
        if turn.donor is not None:
            if not self._cache.copy_from_donor(turn):
                return False
            self._counters.task(turn.task).cached_tokens += turn.count_copied(turn.session.computed)
        return True

    def _computed(self, turn: Turn, item: Work) -> int:
        """The session has KV of these tokens now; gives of how many it had some before, which an update made void."""
        session = turn.session
        end = item.start + len(item.tokens)
        again = turn.count_computed(item.start, end)
        self._counters.task(turn.task).recomputed_tokens += again
        session.computed = end
        if end >= session.void:
            session.void = 0
        return again

    def _finish(self, turn: Turn, token: int) -> FinishReason | None:
        sampling = turn.sampling
        if token in sampling.stop_tokens:
            return FinishReason.STOP
        if sampling.stop_strings and self._stop_strings is not None:
            session = turn.session
            answer = session.tokens(session.length - turn.sampled)
            if self._stop_strings.ended(answer, sampling.stop_strings):
                return FinishReason.STOP
        if turn.sampled == sampling.max_tokens or turn.session.length == self._max_context:
            return FinishReason.LENGTH
        return None

    def _count(self, turns: Sequence[Turn], work: Sequence[Work], again: int, seconds: float) -> None:
        """A step of so many seconds, which are shared out by tokens; `again` of them were computed before."""
        counters = self._counters
        tokens = sum(len(item.tokens) for item in work)
        counters.steps += 1
        counters.batch_tokens += tokens
        counters.batch_requests += len(work)
        counters.largest_batch = max(counters.largest_batch, len(work))
        per_token_s = seconds / tokens
        self._recompute_s += again * per_token_s
        for turn, item in zip(turns, work, strict=True):
            task, count = counters.task(turn.task), len(item.tokens)
            if count > 1 or item.start < turn.prompt_length:
                task.prefill_tokens += count
                task.prefill_s += count * per_token_s
            else:
                task.decode_s += per_token_s
            task.decode_tokens += item.wants_logits

    def _report(self, now: float, events: list[WorkerEvent]) -> None:
        """Twice as often as promised, because a step takes its time."""
        if not self._active():
            return  # not forgotten: who is idle now and then tells of its steps all the same
        if self._report_at is None:
            self._report_at = now + self._settings.progress_interval_s / 2
        if now < self._report_at:
            return
        self._report_at = now + self._settings.progress_interval_s / 2
        parts = tuple((turn.request, turn.report()) for turn in self._running.values() if turn.has_news)
        events.append(Progress(parts, self._steps, self._stepping_s, self._recompute_s))
        self._steps = 0
        self._stepping_s = self._recompute_s = 0.0
