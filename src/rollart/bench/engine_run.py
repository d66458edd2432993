"""The sides of `rollart bench engine`, and their baselines.

All run in this process on one thread and are measured by its CPU time. Each side generates exactly the tokens of a
workload, sampled at temperature 1; prompts and observations are random tokens, the same for every side.
"""

import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import GenerationConfig

from rollart.backends.engines.decoder import StepPlan
from rollart.backends.engines.kv import KvArena
from rollart.backends.engines.torch_engine import TorchEngine
from rollart.backends.engines.weights import Matrix, ModelWeights
from rollart.backends.models import build_model
from rollart.backends.stores.memory import MemoryStore
from rollart.backends.stores.tensors import pack
from rollart.bench.engine import Bench, Turn, Workload
from rollart.config.pools import PoolSettings
from rollart.types.errors import RunError
from rollart.types.ids import RequestId, TrajectoryId
from rollart.types.messages import Add, EndSession, KvOnUpdate, Sampling, Stage, Staged, TurnDone, Update, Updated
from rollart.types.tokens import Segment, TokenSequence
from rollart.types.versions import Version

BATCHES = (1, 16, 64)
LIMITED = "b64"
"""The workload that is compared with the hardware and with vLLM."""
UPDATES = 5
UPDATE_ANSWER = 200
BANDWIDTH_BYTES = 256 * 2**20
"""More than a cache holds."""


def measure(bench: Bench, say: Callable[[str], None], vllm: Path | None) -> dict[str, float]:
    """All figures of one size; those of vLLM if its Python is given."""
    torch.set_num_threads(1)
    model = build_model({"config": bench.config}, dtype="float32", device="cpu")
    ours, theirs = EngineSide(bench, model), GenerateSide(model)
    figures: dict[str, float] = {}
    workloads = {f"b{batch}": bench.single.first(batch) for batch in BATCHES} | {"multiturn": bench.multi}
    for name, workload in workloads.items():
        rates, ratios, shares = [], [], []
        for side in (ours, theirs):
            side.run(workload.first(2))  # exclude one-time costs of the process
        for _ in range(bench.repeats):
            seconds = cpu_seconds(ours.run, workload)
            rates.append(workload.tokens / seconds)
            ratios.append(cpu_seconds(theirs.run, workload) / seconds)
            if name == LIMITED:
                shares.append(limit_seconds(ours, workload) / seconds)
        rate, ratio = statistics.median(rates), statistics.median(ratios)
        figures[f"vs_generate_{name}"], figures[f"tokens_per_cpu_s_{name}"] = ratio, rate
        say(f"  {name}: {rate:,.0f} tokens per CPU-second, {ratio:.2f} × generate")
        if shares:
            figures[f"limit_share_{name}"] = statistics.median(shares)
            say(f"  {name}: {statistics.median(shares):.2f} of the speed of the matrix products alone")
    figures["update_stall_ms"] = ours.update_stall_s(bench.single) * 1e3
    say(f"  an update stalls for {figures['update_stall_ms']:.1f} ms")
    if vllm is not None:
        theirs_too = vllm_rates(vllm, model, bench.single)
        for key, of, what in (
            ("vs_vllm", "tokens_per_cpu_s", "vLLM behind the same port"),
            ("vs_vllm_offline", "offline_tokens_per_cpu_s", "vLLM's offline loop"),
        ):
            ratio = figures[f"tokens_per_cpu_s_{LIMITED}"] / theirs_too[of]
            figures[f"{key}_{LIMITED}"] = ratio
            say(f"  {LIMITED}: {ratio:.2f} × {what}, {theirs_too[of]:,.0f} tokens per CPU-second")
    return figures


def cpu_seconds(work: Callable[..., object], *arguments: object) -> float:
    before = time.process_time()
    work(*arguments)
    return time.process_time() - before


class EngineSide:
    """The torch engine, driven as by a runtime; observations arrive immediately."""

    def __init__(self, bench: Bench, model: Any) -> None:
        self._store = MemoryStore()
        self._tensors = model.state_dict()
        self.vocabulary = int(bench.config["vocab_size"])
        settings = {
            "model": {"config": bench.config},
            "store": self._store,
            "pool": PoolSettings(slots=max(BATCHES), kv_mib=1024.0, kv_on_update=KvOnUpdate.KEEP),
            "max_context": bench.config["max_position_embeddings"],
        }
        self._engine = TorchEngine(settings, lambda: None)
        self._version = Version(0, 0)
        self._requests = 0
        self._take(self._stage())

    def run(self, workload: Workload) -> None:
        conversation = _Conversation(self, workload)
        self._engine.post(conversation.begin())
        while conversation.waiting:
            for event in self._engine.advance(0.0).events:
                if not isinstance(event, TurnDone):
                    raise RunError(f"expected every turn to be served, but got {event}")
                self._engine.post([conversation.on_turn_done(event)])
        self._engine.advance(0.0)

    @contextmanager
    def kv_reads(self) -> Iterator[list[int]]:
        """Bytes of KV that every step must read: that of each session, once, up to its last new token."""
        decoder, read = self._engine._decoder, []
        forward = decoder.forward

        def counted(weights: ModelWeights, kv: KvArena, plan: StepPlan) -> torch.Tensor:
            _row, count, _offset, _capacity, start = plan.pieces.T
            read.append(int((start + count).sum()) * kv.token_bytes)
            return forward(weights, kv, plan)

        decoder.forward = counted  # type: ignore[method-assign]
        try:
            yield read
        finally:
            del decoder.forward

    def next_request(self) -> RequestId:
        self._requests += 1
        return RequestId(self._requests)

    def update_stall_s(self, workload: Workload) -> float:
        """Extra time of a step with an update over other steps, with all slots in flight; the median.

        KV is kept, so this is the cost of the update alone.
        """
        long = Workload(tuple((Turn(turns[0].new, UPDATE_ANSWER),) for turns in workload.trajectories))
        conversation = _Conversation(self, long)
        self._engine.post(conversation.begin())
        stalls = []
        for _ in range(UPDATES):
            version = self._stage()
            steps = [cpu_seconds(self._engine.advance, 0.0) for _ in range(3)]
            self._engine.post([Update(version)])
            stalls.append(cpu_seconds(self._engine.advance, 0.0) - statistics.median(steps))
        self._engine.post(conversation.end())
        self._engine.advance(0.0)
        return statistics.median(stalls)

    def _stage(self) -> Version:
        self._version = Version(0, self._version.step + 1)
        manifest, buckets = pack(self._tensors, version=self._version, parent=None, bucket_bytes=64 * 2**20)
        self._store.publish(manifest, buckets)
        self._engine.post([Stage(manifest)])
        while Staged(self._version) not in self._engine.advance(0.0).events:
            pass
        self._store.drop(self._version)
        return self._version

    def _take(self, version: Version) -> None:
        self._engine.post([Update(version)])
        if Updated(version) not in self._engine.advance(0.0).events:
            raise RunError(f"{version} could not be served")


class _Conversation:
    """The controller's side: sends the turns of a workload, each as soon as the previous one has ended."""

    def __init__(self, side: EngineSide, workload: Workload) -> None:
        self._side = side
        self._random = np.random.default_rng(0)
        self._turns = [list(turns) for turns in workload.trajectories]
        self._logs = [TokenSequence() for _ in self._turns]
        self.waiting: dict[RequestId, int] = {}

    def begin(self) -> list[Add]:
        return [self._add(index) for index in range(len(self._turns))]

    def on_turn_done(self, done: TurnDone) -> Add | EndSession:
        index = self.waiting.pop(done.request)
        self._logs[index].append_sampled(done.generated)
        return self._add(index) if self._turns[index] else EndSession(TrajectoryId(index))

    def end(self) -> list[EndSession]:
        return [EndSession(TrajectoryId(index)) for index in range(len(self._turns))]

    def _add(self, index: int) -> Add:
        turn, log = self._turns[index].pop(0), self._logs[index]
        log.append_context(Segment.of(self._random.integers(0, self._side.vocabulary, turn.new).astype(np.int32)))
        request = self._side.next_request()
        self.waiting[request] = index
        return Add(
            request=request,
            session=TrajectoryId(index),
            task="bench",
            prefix_length=log.turn_length,
            prefix_digest=log.turn_digest,
            new=log.since_turn(),
            sampling=Sampling(turn.answer, seed=request),
        )


class GenerateSide:
    """`transformers.generate`: a left-padded batch per turn, run to its longest answer; every turn prefills from
    scratch."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._model.generation_config = GenerationConfig()

    def run(self, workload: Workload) -> None:
        random = np.random.default_rng(0)
        vocabulary = int(self._model.config.vocab_size)
        contexts: list[NDArray[np.int64]] = [np.empty(0, dtype=np.int64) for _ in workload.trajectories]
        for depth in range(max(len(turns) for turns in workload.trajectories)):
            members = [index for index, turns in enumerate(workload.trajectories) if depth < len(turns)]
            for index in members:
                new = random.integers(0, vocabulary, workload.trajectories[index][depth].new)
                contexts[index] = np.concatenate([contexts[index], new])
            answers = [workload.trajectories[index][depth].answer for index in members]
            generated = self._generate([contexts[index] for index in members], max(answers))
            for index, answer, tokens in zip(members, answers, generated, strict=True):
                contexts[index] = np.concatenate([contexts[index], tokens[:answer]])

    def _generate(self, contexts: list[NDArray[np.int64]], new_tokens: int) -> NDArray[np.int64]:
        width = max(len(context) for context in contexts)
        inputs = torch.zeros(len(contexts), width, dtype=torch.long)
        mask = torch.zeros_like(inputs)
        for row, context in enumerate(contexts):
            inputs[row, width - len(context) :] = torch.from_numpy(context)
            mask[row, width - len(context) :] = 1
        with torch.inference_mode():
            out = self._model.generate(
                inputs, attention_mask=mask, max_new_tokens=new_tokens, do_sample=True, top_k=0, pad_token_id=0
            )
        tokens: NDArray[np.int64] = out[:, width:].numpy()
        return tokens


def vllm_rates(python: Path, model: Any, workload: Workload) -> dict[str, float]:
    """vLLM on the same lengths and architecture, in its own environment; see `bench.vllm`."""
    lengths = [[turns[0].new, turns[0].answer] for turns in workload.trajectories]
    with tempfile.TemporaryDirectory() as folder:
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
        command = [str(python), "-m", "rollart.bench.vllm", folder, json.dumps(lengths)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunError(f"the benchmark of vLLM failed: {done.stderr.strip()[-500:]}")
    rates: dict[str, float] = json.loads(done.stdout)
    return rates


# --- the limit ------------------------------------------------------------------------------------------------------


class Product(NamedTuple):
    """One matrix product of a run: its sizes, and the weights it read."""

    rows: int
    inner: int
    columns: int
    weights: int


@contextmanager
def recorded_products() -> Iterator[list[Product]]:
    """Record every matrix product with weights, in order."""
    products: list[Product] = []
    times, add_times = Matrix.times, Matrix.add_times

    def noted_times(matrix: Matrix, rows: torch.Tensor) -> torch.Tensor:
        out = times(matrix, rows)
        products.append(Product(rows.shape[0], rows.shape[1], out.shape[1], id(matrix)))
        return out

    def noted_add_times(matrix: Matrix, rows: torch.Tensor, total: torch.Tensor) -> None:
        products.append(Product(rows.shape[0], rows.shape[1], total.shape[1], id(matrix)))
        add_times(matrix, rows, total)

    with patch.multiple(Matrix, times=noted_times, add_times=noted_add_times):
        yield products


def limit_seconds(side: EngineSide, workload: Workload) -> float:
    """Time of a run's matrix products alone, plus reading its KV once at memory bandwidth."""
    with recorded_products() as products, side.kv_reads() as read:
        side.run(workload)
    weights: dict[int, torch.Tensor] = {}
    for product in products:
        if product.weights not in weights:
            # The layout in which `torch.mm` is fastest.
            columns, inner = product.columns, product.inner
            plain = torch.full((inner, columns) if columns > inner else (columns, inner), 0.01)
            weights[product.weights] = plain if columns > inner else plain.t()
    inputs = {size: torch.full(size, 0.01) for size in {product[:2] for product in products}}
    outputs = {size: torch.empty(size) for size in {(product.rows, product.columns) for product in products}}

    @torch.inference_mode()
    def replay() -> None:
        for product in products:
            torch.mm(
                inputs[product.rows, product.inner],
                weights[product.weights],
                out=outputs[product.rows, product.columns],
            )

    return cpu_seconds(replay) + sum(read) / read_bytes_per_s()


def read_bytes_per_s() -> float:
    block = torch.ones(BANDWIDTH_BYTES // 4)
    best_s: float = min(cpu_seconds(block.sum) for _ in range(5))
    return BANDWIDTH_BYTES / best_s
