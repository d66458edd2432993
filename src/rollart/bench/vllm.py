"""Tokens per CPU-second of vLLM, for `rollart bench engine`; runs in an environment with vLLM.

    .venv-vllm/bin/python -m rollart.bench.vllm MODEL_FOLDER LENGTHS_JSON

`MODEL_FOLDER` needs a config.json; weights are random. `LENGTHS_JSON` is a file with one `[prompt, answer]`, in tokens,
for each request, or the JSON itself. All requests are submitted at once and `SLOTS` run together, on one thread, with
the log-probability of every token, as the Engine port requires. Only one JSON object goes to stdout:

    {"tokens": …, "tokens_per_cpu_s": …, "offline_tokens_per_cpu_s": …, "vllm": "0.32.0"}

The first rate is that of vLLM behind the Engine port, as a run would use it: `AsyncLLM`, with the engine core and its
worker in their own processes. The other is that of its `LLM`, all in one process and for batches known in advance: the
minimum cost of vLLM. CPU time covers all threads of this process and its descendants, the median of `REPEATS` runs; the
first run, which compiles, does not count.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SLOTS = 64
REPEATS = 3
KV_BYTES = 2 << 30
POLL_S = 0.005
USAGE = "usage: python -m rollart.bench.vllm MODEL_FOLDER LENGTHS_JSON"
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def measure(folder: Path, lengths: list[tuple[int, int]]) -> dict[str, Any]:
    """Generate everything `REPEATS` times each way, after a warm-up."""
    import torch  # here: both take seconds to import, and read the environment at import
    import vllm

    torch.set_num_threads(1)
    tokens = sum(answer for _, answer in lengths)
    arguments = {
        "max_num_seqs": SLOTS,
        "max_model_len": max(prompt + answer for prompt, answer in lengths),
        "kv_cache_memory_bytes": KV_BYTES,
        "gpu_memory_utilization": 0.2,
    }
    engine, generate = _engine(folder, lengths, arguments)
    behind_the_port = _rate(tokens, generate)
    engine.close()
    os.environ.update(ONE_PROCESS)
    return {
        "tokens": tokens,
        "tokens_per_cpu_s": behind_the_port,
        "offline_tokens_per_cpu_s": _rate(tokens, _offline(folder, lengths, arguments)),
        "vllm": vllm.__version__,
    }


def _rate(tokens: int, generate: Callable[[], int]) -> float:
    seconds = []
    for _ in range(1 + REPEATS):
        before_s = _cpu_s()
        generated = generate()
        seconds.append(_cpu_s() - before_s)
        if generated != tokens:
            raise RuntimeError(f"vLLM generated {generated} tokens instead of {tokens}")
    return tokens / statistics.median(seconds[1:])


def _engine(folder: Path, lengths: list[tuple[int, int]], arguments: dict[str, Any]) -> tuple[Any, Callable[[], int]]:
    """rollart's vLLM engine, and a function that drives it as a runtime would."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from rollart.backends.engines.vllm import VllmEngine
    from rollart.backends.stores.memory import MemoryStore
    from rollart.backends.stores.tensors import pack
    from rollart.config.pools import PoolSettings
    from rollart.types.ids import RequestId, TrajectoryId
    from rollart.types.messages import Add, Sampling, Stage, Staged, TurnDone, Update, Updated
    from rollart.types.tokens import Segment
    from rollart.types.versions import Version

    version, store = Version(0, 0), MemoryStore()
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).float()
    manifest, buckets = pack(model.state_dict(), version=version, parent=None, bucket_bytes=64 * 2**20)
    store.publish(manifest, buckets)
    # No progress reports: all tokens come at the end of a turn.
    own = {"model": str(folder), "store": store, "progress_interval_s": 3600.0}
    slots, context = arguments.pop("max_num_seqs"), arguments.pop("max_model_len")
    engine = VllmEngine(own | {"pool": PoolSettings(slots=slots, vllm=arguments), "max_context": context}, lambda: None)
    arguments |= {"max_num_seqs": slots, "max_model_len": context}

    def wait(count: int, kind: type) -> list[Any]:
        events: list[Any] = []
        while len(events) < count:
            events += [event for event in engine.advance(time.monotonic()).events if isinstance(event, kind)]
            time.sleep(POLL_S)
        return events

    engine.post([Stage(manifest)])
    wait(1, Staged)
    engine.post([Update(version)])
    wait(1, Updated)
    prompts = _prompts(lengths, model.config.vocab_size)
    first = 0

    def generate() -> int:
        nonlocal first
        adds = [
            Add(
                request=RequestId(first + index),
                session=TrajectoryId(first + index),
                task="bench",
                prefix_length=0,
                prefix_digest=b"",
                new=Segment.of(prompt),
                sampling=Sampling(answer, seed=index),
            )
            for index, (prompt, (_, answer)) in enumerate(zip(prompts, lengths, strict=True))
        ]
        first += len(adds)
        engine.post(adds)
        return sum(done.generated.tokens.length for done in wait(len(adds), TurnDone))

    return engine, generate


def _offline(folder: Path, lengths: list[tuple[int, int]], arguments: dict[str, Any]) -> Callable[[], int]:
    import vllm

    engine = vllm.LLM(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="float32",
        enable_prefix_caching=False,  # every repeat computes its prompts
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
        **arguments,
    )
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    prompts = [vllm.TokensPrompt(prompt_token_ids=prompt) for prompt in _prompts(lengths, vocabulary)]
    sampling = [
        vllm.SamplingParams(max_tokens=answer, ignore_eos=True, logprobs=0, detokenize=False) for _, answer in lengths
    ]

    def generate() -> int:
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return generate


def _prompts(lengths: list[tuple[int, int]], vocabulary: int) -> list[list[int]]:
    return [
        [(31 * index + 7 * place) % vocabulary for place in range(prompt)] for index, (prompt, _) in enumerate(lengths)
    ]


def _cpu_s() -> float:
    """CPU time of this process and all its descendants, including live ones."""
    parents, ticks = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:  # the process ended meanwhile
            continue
        pid, fields = int(stat.parent.name), text.rpartition(")")[2].split()
        parents[pid] = int(fields[1])
        # utime and stime, and those of reaped children
        ticks[pid] = sum(int(field) for field in fields[11:15])
    mine = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in mine} - mine:
        mine |= more
    return sum(ticks[pid] for pid in mine) / os.sysconf("SC_CLK_TCK")


def _lengths(argument: str) -> list[tuple[int, int]]:
    text = argument if argument.lstrip().startswith("[") else Path(argument).read_text()
    lengths = [(int(prompt), int(answer)) for prompt, answer in json.loads(text)]
    if not lengths or min(min(pair) for pair in lengths) < 1:
        raise ValueError("lengths are pairs of at least 1 token each")
    return lengths


def main(arguments: list[str]) -> int:
    if len(arguments) != 2:
        sys.stderr.write(USAGE + "\n")
        return 2
    try:
        lengths = _lengths(arguments[1])
    except (OSError, ValueError, TypeError) as error:
        sys.stderr.write(f"{arguments[1]!r} is not a list of [prompt, answer]: {error}\n{USAGE}\n")
        return 2
    os.environ.update(ENVIRONMENT)
    # vLLM and its imports write to stdout, which is redirected to stderr from here on.
    with os.fdopen(os.dup(1), "w") as answer:
        os.dup2(2, 1)
        answer.write(json.dumps(measure(Path(arguments[0]), lengths)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
