"""The torch engine: continuous batching on plain PyTorch, for the model families of `checkpoint_config`.

One step is one forward pass: a token for every request that decodes, and up to `prefill_tokens` tokens of prompts
beside them.

    Add ──► queue ──► (a slot, and KV memory for all it may need) ──► running ──► TurnDone
                                                                        │  ▲
                        Update: KV is void, computed again in chunks ◄──┘  └── a token per step, with its version

Invariants, besides those of `shell`:
- a token carries the version that was in service in the step that sampled it, and that version was verified;
- the samples of a request do not depend on what else runs (see `token_sampling`);
- KV memory is fixed when the engine starts; a request without room waits, a running one keeps its memory.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from rollart.backends.engines.checkpoint_config import ModelShape, read_shape
from rollart.backends.engines.checkpoint_tensors import load_tensors
from rollart.backends.engines.counters import EngineCounters
from rollart.backends.engines.decoder import Decoder
from rollart.backends.engines.kv import KvArena
from rollart.backends.engines.kv_sessions import KvSession, KvTurn
from rollart.backends.engines.planning import Work, plan_step
from rollart.backends.engines.session_cache import SessionCache
from rollart.backends.engines.shell import EngineSettings
from rollart.backends.engines.staging import Staging
from rollart.backends.engines.stepped_engine import SteppedEngine
from rollart.backends.engines.stop_strings import StopStrings
from rollart.backends.engines.token_sampling import sample
from rollart.backends.engines.weights import ModelWeights, prepare, prepare_now, wanted_tensors
from rollart.config.injection import slowdown_at
from rollart.types.errors import InvariantBroken, RequestError
from rollart.types.ids import RequestId
from rollart.types.messages import Add, FinishReason, KvOnUpdate, Sampling, TurnDone
from rollart.types.versions import Version

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class TorchEngineSettings(EngineSettings):
    """Settings of the torch engine. Its KV memory may limit the context below `max_context`."""

    serve_folder_as: tuple[int, int] | None = None
    """Serve the folder's own weights from the start, as this (epoch, step); None = wait for the first update."""


class TorchEngine(SteppedEngine[KvSession, KvTurn, ModelWeights]):
    """An engine worker; its factory path is `rollart.backends.engines.torch_engine:TorchEngine`."""

    def __init__(self, settings: Mapping[str, Any], wake: Callable[[], None]) -> None:
        # Per thread, and workers are built in theirs. More threads get slow as soon as two workers share the machine.
        torch.set_num_threads(1)
        own = self._settings = TorchEngineSettings.model_validate(dict(settings))
        dtype, self._device = DTYPES[own.pool.dtype], torch.device(own.pool.device)
        shape = read_shape(own.model)
        arena = KvArena(shape, budget_bytes=int(own.pool.kv_mib * 2**20), dtype=dtype, device=self._device)
        self._max_context = min(own.max_context, arena.largest_tokens)
        if self._max_context < own.max_context:
            self._context_limit = "the KV memory"
        self._decoder = Decoder(shape, dtype=dtype, device=self._device, max_context=self._max_context)
        self._cache = SessionCache(arena)
        self._stop_strings = StopStrings.of(own.model)
        self._weights: ModelWeights | None = None
        version = None
        if own.serve_folder_as is not None:
            self._weights = _folder_weights(own.model, shape, dtype, self._device)
            version = Version(*own.serve_folder_as)
        self._running: dict[RequestId, KvTurn] = {}
        self._queued: dict[RequestId, KvTurn] = {}
        self._started = 0
        self._counters = EngineCounters()
        super().__init__(
            own.info(own.pool.kv_on_update, max_context=self._max_context),
            self._cache,
            Staging(
                own.store,
                wanted_tensors(shape, dtype),
                lambda tensors: prepare(tensors, shape, dtype=dtype, device=self._device),
                wake=wake,
            ),
            vocabulary=shape.vocabulary,
            version=version,
        )
        self._started_at = time.perf_counter()

    def close(self) -> None:
        super().close()
        self._running.clear()
        self._queued.clear()
        self._weights = None

    # --- for operators and tests

    def counters(self) -> EngineCounters:
        """Return a copy of the counters."""
        self._counters.evicted_sessions = self._cache.evicted
        self._counters.prefix_misses = self._prefix_misses
        tasks = {name: msgspec.structs.replace(task) for name, task in self._counters.tasks.items()}
        return msgspec.structs.replace(self._counters, tasks=tasks)

    def check(self) -> None:
        """Raise `InvariantBroken` unless KV memory, sessions and requests agree."""
        self._cache.check()

    @property
    def kv_tokens_used(self) -> int:
        """Total size of the sessions' blocks, in tokens."""
        return self._cache.arena.used_tokens

    # --- turns and weights

    def _refuses(self, sampling: Sampling) -> str:
        if not 0 < sampling.top_p <= 1 or sampling.top_k < 0:
            return f"top_p {sampling.top_p:g} and top_k {sampling.top_k}, but 0 < top_p <= 1 and top_k >= 0 must hold"
        if sampling.stop_strings and self._stop_strings is None:
            return "stop strings, but the model has no tokenizer.json: serve a checkpoint folder that has one"
        return ""

    def _start(self, add: Add, session: KvSession) -> KvTurn:
        turn = self._queued[add.request] = KvTurn(add, session)
        self._cache.touch(session)
        return turn

    def _abort(self, turn: KvTurn) -> TurnDone:
        (self._running if turn.number else self._queued).pop(turn.request)
        return turn.done(FinishReason.ABORTED)

    def _swap(self, version: Version) -> bool:
        began = time.perf_counter()
        self._weights = self._staging.take(version)
        if self._settings.pool.kv_on_update is KvOnUpdate.RECOMPUTE:
            self._cache.void_all()
            for turn in self._running.values():
                turn.donor = None
                turn.seeks_donor = True
        self._counters.updates += 1
        self._counters.update_s += time.perf_counter() - began
        return True

    # --- generation

    def _step(self) -> list[TurnDone]:
        began = time.perf_counter()
        self._admit()
        turns, work = self._choose()
        if self._weights is None or self._version is None:
            raise InvariantBroken("a request runs, but no version is in service")
        plan, outputs = plan_step(work, self._device)
        logits = self._decoder.forward(self._weights, self._cache.arena, plan)
        again = sum(self._computed(turn, item) for turn, item in zip(turns, work, strict=True))
        sampling = [turns[index] for index in outputs]
        ended = []
        if sampling:
            sampled = sample(logits, [turn.sampling for turn in sampling], [turn.session.length for turn in sampling])
            for turn, token, logprob in zip(sampling, sampled.tokens.tolist(), sampled.logprobs.tolist(), strict=True):
                turn.take_one(token, logprob, self._version)
                finish = self._finish(turn, token)
                if finish is not None:
                    del self._running[turn.request]
                    self._work.ended(turn.task)
                    ended.append(turn.done(finish))
        self._count(turns, work, again, time.perf_counter() - began)
        return ended

    def _admit(self) -> None:
        """Start queued requests in FIFO order while there are slots and KV memory."""
        while self._queued and len(self._running) < self._settings.pool.slots:
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
            # The last token is always computed: its logits are needed.
            session.computed = min(session.computed, session.length - 1)
            self._cache.share(session)
            turn.begin()
            self._counters.task(turn.task).cached_tokens += session.computed

    def _choose(self) -> tuple[list[KvTurn], list[Work]]:
        """Choose the work of this step: every decoding request, and prompts in order of arrival."""
        turns, work = [], []
        room = self._settings.pool.prefill_tokens
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

    def _shared(self, turn: KvTurn) -> bool:
        """Copy KV of this prompt from another session, if one has it; False if it is still being computed there."""
        if turn.seeks_donor:
            self._cache.find_donor(turn)
        if turn.donor is not None:
            if not self._cache.copy_from_donor(turn):
                return False
            self._counters.task(turn.task).cached_tokens += turn.count_copied(turn.session.computed)
        return True

    def _computed(self, turn: KvTurn, item: Work) -> int:
        """Mark these tokens as computed; return how many of them an update had invalidated."""
        session = turn.session
        end = item.start + len(item.tokens)
        again = turn.count_computed(item.start, end)
        self._counters.task(turn.task).recomputed_tokens += again
        session.computed = end
        if end >= session.void:
            session.void = 0
        return again

    def _finish(self, turn: KvTurn, token: int) -> FinishReason | None:
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

    def _count(self, turns: Sequence[KvTurn], work: Sequence[Work], again: int, seconds: float) -> None:
        """Count a step, and slow it if that is wanted. Its seconds are divided among its tokens; `again` of them had
        been computed before."""
        counters, meter = self._counters, self._work
        prompts = [
            len(item.tokens) > 1 or item.start < turn.prompt_length for turn, item in zip(turns, work, strict=True)
        ]
        tokens = sum(len(item.tokens) for item in work)
        counters.steps += 1
        counters.batch_tokens += tokens
        counters.batch_requests += len(work)
        counters.largest_batch = max(counters.largest_batch, len(work))
        prefill_s = decode_s = seconds / tokens
        if self._settings.pool.inject:
            decoding = prompts.count(False)
            prefill_s, decode_s = self._slow_down(tokens - decoding, decoding, seconds / tokens)
        self._recompute_s += again * prefill_s
        for turn, item, is_prompt in zip(turns, work, prompts, strict=True):
            task, count = counters.task(turn.task), len(item.tokens)
            if is_prompt:
                task.prefill_tokens += count
                task.prefill_s += count * prefill_s
                meter.prefilled(turn.task, count, count * prefill_s)
            else:
                task.decode_s += decode_s
                meter.decoded(turn.task, decode_s, 1.0 / tokens)
            task.decode_tokens += item.wants_logits

    def _slow_down(self, prompt_tokens: int, decoding: int, per_token_s: float) -> tuple[float, float]:
        """Wait as configured; return the seconds per token of a prompt and of decoding, with the waiting.

        A sleep leaves the processor to others, as a slower device of its own would.
        """
        slowdown = slowdown_at(self._settings.pool.inject, time.perf_counter() - self._started_at)
        prefill_s, decode_s = slowdown.prefill * per_token_s, slowdown.decode * per_token_s
        extra_s = prompt_tokens * (prefill_s - per_token_s) + decoding * (decode_s - per_token_s)
        if extra_s > 0.0:
            time.sleep(extra_s)
        return prefill_s, decode_s


def _folder_weights(
    model: str | dict[str, Any], shape: ModelShape, dtype: torch.dtype, device: torch.device
) -> ModelWeights:
    if not isinstance(model, str):
        raise RequestError("serve_folder_as needs a model that is a checkpoint folder; a config has no weights")
    return prepare_now(load_tensors(Path(model), shape), shape, dtype=dtype, device=device)
