"""vLLM's `AsyncLLM` on an event loop in its own thread, behind plain calls.

Calls return at once and are executed in order; results are passed to a listener, in the loop's thread.

Invariants:
- every added request is reported by `Sampled` parts in order, then by one `Ended`;
- a token's version is the one that the engine core had in that step, as reported by the core itself;
- while suspended no step is taken; a version is loaded between two steps, and everything computed with the previous
  one is dropped if KV is to be recomputed.
"""

import asyncio
import concurrent.futures
import os
import pickle
import tempfile
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import msgspec

from rollart.backends.engines.vllm_ranks import Rank
from rollart.backends.stores.folder import FolderStore
from rollart.ports.factory import imports
from rollart.ports.weights import NodeCopies, WeightStore
from rollart.types.errors import RequestError, RollartError
from rollart.types.messages import Sampling, Staged, StageFailed
from rollart.types.tokens import VersionRun, merge_runs
from rollart.types.versions import Version
from rollart.types.weights import Manifest, WeightKind

T = TypeVar("T")
START_PATIENCE_S = 1800.0
"""Time limit for the start; a large model takes minutes."""
CLOSE_PATIENCE_S = 30.0
CORE_EXIT_S = 3.0
"""Grace period of vLLM's processes on close; then vLLM kills them.

Its own default is five seconds, which is all that a stopped worker has. The engine core releases what it holds in a
fraction of a second and then spends about two seconds, more on a busy machine, in Python's finalization.
"""
STAGING_POLL_S = 0.02
NO_VERSION = Version(-1, 0)
"""Version before the first update: vLLM's own start, with meaningless weights."""


class Sampled(NamedTuple):
    """New tokens of a request. `cached` is the number of prompt tokens found in the KV cache."""

    request: str
    tokens: Sequence[int]
    logprobs: Sequence[float]
    runs: tuple[VersionRun, ...]
    cached: int


class Ended(NamedTuple):
    """The request is over: `stop`, `length` or `abort`. `refused` is the reason if vLLM rejected it."""

    request: str
    reason: str
    refused: str = ""


class Loaded(NamedTuple):
    version: Version


class Alive(NamedTuple):
    """The engine core has answered a probe: it is between two steps and not stuck in one."""


class Broken(NamedTuple):
    """vLLM failed and produces nothing more."""

    error: BaseException


CoreEvent = Sampled | Ended | Loaded | Alive | Broken | Staged | StageFailed


class VllmCore:
    """One vLLM engine. `arguments` are those of vLLM's `AsyncEngineArgs`; weights come only by `stage` and `load`."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self._vllm = _import_vllm()
        self._engine: Any
        self.vocabulary: int
        self.tokenizer: bool
        self._listener: Callable[[CoreEvent], None] = lambda _event: None
        self._stamps: dict[str, deque[VersionRun]] = {}
        """Per request: versions of tokens in transit to its follower."""
        self._tasks: set[asyncio.Task[None]] = set()
        """Followers of requests, and other tasks that end by themselves."""
        self._caller: asyncio.Task[None] | None = None
        self._suspended = False
        self.steps = 0
        """Total number of steps that produced tokens."""
        self._loop = asyncio.new_event_loop()
        self._calls: asyncio.Queue[Callable[[], Awaitable[None]]] = asyncio.Queue()
        self._ended = concurrent.futures.Future[None]()
        threading.Thread(target=self._run, name="vllm-loop", daemon=True).start()
        try:
            self._wait(self._start(dict(arguments)), START_PATIENCE_S)
        except BaseException:
            self._stop_loop()
            raise

    # --- calls, from any thread

    def listen(self, listener: Callable[[CoreEvent], None]) -> None:
        """Set the listener. Resets all state: no request, nothing staged, not paused."""
        self._wait(self._reset(listener), START_PATIENCE_S)

    def add(self, request: str, prompt: Sequence[int], sampling: Sampling, seed: int) -> None:
        self._call(lambda: self._add(request, prompt, sampling, seed))

    def abort(self, request: str) -> None:
        """Abort a request; `Ended` follows, unless it was in transit already."""
        self._call(lambda: self._engine.abort(request))

    def suspend(self) -> None:
        self._call(self._suspend)

    def resume(self) -> None:
        self._call(self._resume)

    def stage(self, manifest: Manifest, store: WeightStore) -> None:
        """Stage a version; `Staged` or `StageFailed` follows. Generation continues meanwhile."""
        self._call(lambda: self._spawn(self._stage(manifest, store)))

    def load(self, version: Version, *, recompute: bool) -> None:
        """Serve a staged version, with KV in flight kept or recomputed; `Loaded` follows."""
        self._call(lambda: self._load(version, recompute))

    def probe(self) -> None:
        """Probe the core; `Alive` follows if it is."""
        self._call(lambda: self._spawn(self._probe()))

    def close(self) -> None:
        with suppress(concurrent.futures.TimeoutError):
            self._wait(self._shutdown(), CLOSE_PATIENCE_S)
        self._stop_loop()

    # --- the loop

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()
        self._ended.set_result(None)

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        with suppress(concurrent.futures.TimeoutError):
            self._ended.result(CLOSE_PATIENCE_S)

    def _wait(self, coroutine: Coroutine[Any, Any, T], seconds: float) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(seconds)

    def _call(self, function: Callable[[], Awaitable[None]]) -> None:
        self._loop.call_soon_threadsafe(self._calls.put_nowait, function)

    async def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run concurrently with later calls."""
        task = asyncio.create_task(self._guarded(coroutine))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guarded(self, coroutine: Coroutine[Any, Any, None]) -> None:
        try:
            await coroutine
        except Exception as error:  # noqa: BLE001 - passed to the listener, which ends the worker with it
            self._listener(Broken(error))

    async def _carry_out(self) -> None:
        """Execute all calls, one after the other."""
        while True:
            await (await self._calls.get())()

    async def _start(self, arguments: dict[str, Any]) -> None:
        fixed = {
            "load_format": "dummy",
            "logprobs_mode": "processed_logprobs",
            "enable_prefix_caching": True,
            "generation_config": "vllm",  # not the checkpoint's own sampling defaults
            "worker_extension_cls": f"{Rank.__module__}.{Rank.__qualname__}",
        }
        if self._vllm.platform.is_cpu():
            # When a prompt is computed in parts, vLLM rewinds the random generator in between, which crashes on a CPU,
            # whose generators cannot be rewound. So every prompt is computed in one step.
            whole = arguments["max_num_seqs"] * arguments["max_model_len"]
            arguments["max_num_batched_tokens"] = max(whole, arguments.get("max_num_batched_tokens", 0))
        self._engine = self._vllm.AsyncLLM.from_engine_args(self._vllm.AsyncEngineArgs(**arguments, **fixed))
        self.vocabulary = self._engine.model_config.get_vocab_size()
        self.tokenizer = not self._engine.model_config.skip_tokenizer_init
        self._watch_versions()
        await self._warm_up()
        self._caller = asyncio.create_task(self._guarded(self._carry_out()))

    async def _warm_up(self) -> None:
        """Take the first step, which compiles, before the engine joins."""
        await self._engine.update_weight_version(_label(NO_VERSION))
        await self._add("warm-up", [0] * 8, Sampling(max_tokens=2), 0)
        await asyncio.gather(*self._tasks)

    async def _reset(self, listener: Callable[[CoreEvent], None]) -> None:
        self._listener = lambda _event: None
        await self._engine.abort(list(self._stamps))
        await asyncio.gather(*self._tasks)
        await self._engine.collective_rpc("rollart_open", args=(os.getpid(),))
        await self._engine.reset_prefix_cache()
        await self._resume()
        self._listener = listener

    async def _shutdown(self) -> None:
        self._listener = lambda _event: None
        # vLLM's output handler would log the end of the core as an error.
        tasks = [task for task in (self._caller, *self._tasks, self._engine.output_handler) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(self._engine.shutdown, timeout=CORE_EXIT_S)

    # --- requests

    def _watch_versions(self) -> None:
        """Stamp every token with its version on arrival.

        The engine core sends the version with each step, but `AsyncLLM` exposes it only at the end of a request, which
        is too late for earlier reports.
        """
        processor = self._engine.output_processor
        process = processor.process_outputs

        def stamped(outputs: Sequence[Any], *args: Any, weight_version: str, **kwargs: Any) -> Any:
            version = _version(weight_version)
            self.steps += bool(outputs)
            for output in outputs:
                state = processor.request_states.get(output.request_id)
                if state is not None and output.new_token_ids:
                    self._stamps[state.external_req_id].append(VersionRun(version, len(output.new_token_ids)))
            return process(outputs, *args, weight_version=weight_version, **kwargs)

        processor.process_outputs = stamped

    async def _add(self, request: str, prompt: Sequence[int], sampling: Sampling, seed: int) -> None:
        self._stamps[request] = deque()
        params = self._vllm.SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            stop_token_ids=list(sampling.stop_tokens),
            stop=list(sampling.stop_strings),
            ignore_eos=True,
            seed=seed,
            logprobs=0,
            detokenize=bool(sampling.stop_strings),
            skip_special_tokens=False,
            output_kind=self._vllm.RequestOutputKind.DELTA,
        )
        try:
            queue = await self._engine.add_request(request, self._vllm.tokens_input(list(prompt)), params)
        except ValueError as error:  # vLLM will never serve it
            del self._stamps[request]
            self._listener(Ended(request, "abort", refused=str(error)))
            return
        await self._spawn(self._follow(request, queue))

    async def _follow(self, request: str, queue: Any) -> None:
        """Report a request until it ends."""
        stamps = self._stamps[request]
        while True:
            output = await queue.get()
            part = output.outputs[0]
            if part.token_ids:
                logprobs = [entry[token].logprob for token, entry in zip(part.token_ids, part.logprobs, strict=True)]
                runs = _take(stamps, len(part.token_ids))
                self._listener(Sampled(request, part.token_ids, logprobs, runs, output.num_cached_tokens or 0))
            if output.finished:
                break
        del self._stamps[request]
        if part.finish_reason not in ("stop", "length", "abort"):
            raise RuntimeError(f"vLLM ended request {request} with {part.finish_reason!r}")
        self._listener(Ended(request, part.finish_reason))

    async def _probe(self) -> None:
        await self._engine.is_paused()
        self._listener(Alive())

    # --- pausing and weights

    async def _suspend(self) -> None:
        self._suspended = True
        await self._engine.pause_generation(mode="keep", clear_cache=False)

    async def _resume(self) -> None:
        self._suspended = False
        await self._engine.resume_generation()

    async def _stage(self, manifest: Manifest, store: WeightStore) -> None:
        version = manifest.version
        try:
            failed = await self._stage_anywhere(manifest, store)
        except Exception as error:  # noqa: BLE001 - the store may be third-party: its errors fail only this version
            failed = f"{type(error).__name__}: {error}"
        self._listener(StageFailed(version, failed) if failed else Staged(version))

    async def _stage_anywhere(self, manifest: Manifest, store: WeightStore) -> str:
        """Stage on every rank; returns the failure, or empty if verified. Stores local to this process are copied."""
        if isinstance(store, NodeCopies):  # ranks are not connected to the cluster
            store = await asyncio.to_thread(store.on_this_node, manifest.version)
        try:
            pickled = pickle.dumps(store)
        except (RollartError, pickle.PicklingError, TypeError, AttributeError):
            with tempfile.TemporaryDirectory(prefix="rollart-stage-") as folder:
                relay = FolderStore(folder)
                await asyncio.to_thread(_copy, manifest, store, relay)
                return await self._stage_in_ranks(manifest, pickle.dumps(relay))
        return await self._stage_in_ranks(manifest, pickled)

    async def _stage_in_ranks(self, manifest: Manifest, store: bytes) -> str:
        version = (manifest.version.epoch, manifest.version.step)
        await self._engine.collective_rpc("rollart_stage", args=(msgspec.json.encode(manifest), store))
        while True:
            answers: list[str | None] = await self._engine.collective_rpc("rollart_staged", args=version)
            if all(answer is not None for answer in answers):
                return next((answer for answer in answers if answer), "")
            await asyncio.sleep(STAGING_POLL_S)

    async def _load(self, version: Version, recompute: bool) -> None:
        await self._engine.pause_generation(mode="keep", clear_cache=recompute)
        await self._engine.collective_rpc("rollart_load", args=(version.epoch, version.step))
        await self._engine.update_weight_version(_label(version))
        self._listener(Loaded(version))
        if not self._suspended:
            await self._engine.resume_generation()


def _import_vllm() -> Any:
    with imports:
        return _vllm_names()


def _vllm_names() -> Any:
    # Standard output belongs to the command: with `--json` it is exactly one object.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    try:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.inputs.engine import tokens_input
        from vllm.platforms import current_platform
        from vllm.sampling_params import RequestOutputKind, SamplingParams
        from vllm.v1.engine.async_llm import AsyncLLM
    except ImportError as error:
        raise RequestError(
            f"this engine needs vLLM 0.32 or newer, which cannot be imported here ({error}). Install it with "
            "`pip install 'rollart[vllm]'` for GPUs; for CPUs `make venv-vllm` shows how. Or use another engine."
        ) from error

    class Names(NamedTuple):
        AsyncEngineArgs: Any
        AsyncLLM: Any
        RequestOutputKind: Any
        SamplingParams: Any
        platform: Any
        tokens_input: Any

    return Names(AsyncEngineArgs, AsyncLLM, RequestOutputKind, SamplingParams, current_platform, tokens_input)


def _copy(manifest: Manifest, store: WeightStore, target: FolderStore) -> None:
    """Copy a version from a store that only this process sees to where the ranks find it."""
    if manifest.kind is WeightKind.FULL:  # the ranks refuse all others, with a reason
        count = len(manifest.digests)
        target.publish(manifest, [store.bucket(manifest.version, index) for index in range(count)])


def _take(stamps: deque[VersionRun], count: int) -> tuple[VersionRun, ...]:
    """Take the versions of the next `count` tokens off the queue."""
    runs: tuple[VersionRun, ...] = ()
    while count:
        run = stamps.popleft()
        taken = min(run.length, count)
        runs = merge_runs(runs, (VersionRun(run.version, taken),))
        if taken < run.length:
            stamps.appendleft(VersionRun(run.version, run.length - taken))
        count -= taken
    return runs


def _label(version: Version) -> str:
    return f"{version.epoch}.{version.step}"


def _version(label: str) -> Version:
    epoch, step = label.split(".")
    return Version(int(epoch), int(step))
