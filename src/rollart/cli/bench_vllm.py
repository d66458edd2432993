"""How many tokens vLLM generates per CPU-second, for `rollart bench engine`; runs where vLLM is installed.

    .venv-vllm/bin/python -m rollart.cli.bench_vllm MODEL_FOLDER LENGTHS_JSON

`MODEL_FOLDER` needs a config.json; weights are random. `LENGTHS_JSON` is a file with one `[prompt, answer]`, in tokens,
for each request, or the JSON itself. All requests are given at once and `SLOTS` run together, in this process and one
thread, with the log-probability of every token, as an engine owes it. One JSON object goes to stdout and nothing else:

    {"tokens": …, "cpu_s": …, "wall_s": …, "tokens_per_cpu_s": …, "vllm": "0.32.0"}

CPU time is that of all threads of this process and of processes that it waited for, the median of `REPEATS` runs; the
first one, which compiles, does not count.
"""

import json
import os
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

SLOTS = 64
REPEATS = 3
KV_BYTES = 2 << 30
USAGE = "usage: python -m rollart.cli.bench_vllm MODEL_FOLDER LENGTHS_JSON"
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core in this process, whose CPU time is measured
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


def measure(folder: Path, lengths: list[tuple[int, int]]) -> dict[str, Any]:
    """Generate all of it `REPEATS` times after one that warms up."""
    import torch  # here: both take seconds, and read the environment when they are imported
    import vllm

    torch.set_num_threads(1)
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    engine = vllm.LLM(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="float32",
        max_num_seqs=SLOTS,
        max_model_len=max(prompt + answer for prompt, answer in lengths),
        kv_cache_memory_bytes=KV_BYTES,
        gpu_memory_utilization=0.2,
        enable_prefix_caching=False,  # every repeat computes its prompts
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
    )
    prompts = [
        vllm.TokensPrompt(prompt_token_ids=[(31 * index + 7 * place) % vocabulary for place in range(prompt)])
        for index, (prompt, _) in enumerate(lengths)
    ]
    sampling = [
        vllm.SamplingParams(max_tokens=answer, ignore_eos=True, logprobs=0, detokenize=False) for _, answer in lengths
    ]
    cpu_s, wall_s = [], []
    for _ in range(1 + REPEATS):
        cpu, wall = _cpu_s(), time.perf_counter()
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        cpu_s.append(_cpu_s() - cpu)
        wall_s.append(time.perf_counter() - wall)
        generated = [len(output.outputs[0].token_ids) for output in outputs]
        if generated != [answer for _, answer in lengths]:
            raise RuntimeError("vLLM did not generate as many tokens as were asked for")
    tokens = sum(answer for _, answer in lengths)
    return {
        "tokens": tokens,
        "cpu_s": statistics.median(cpu_s[1:]),
        "wall_s": statistics.median(wall_s[1:]),
        "tokens_per_cpu_s": tokens / statistics.median(cpu_s[1:]),
        "vllm": vllm.__version__,
    }


def _cpu_s() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def _lengths(argument: str) -> list[tuple[int, int]]:
    text = argument if argument.lstrip().startswith("[") else Path(argument).read_text()
    lengths = [(int(prompt), int(answer)) for prompt, answer in json.loads(text)]
    if not lengths or min(min(pair) for pair in lengths) < 1:
        raise ValueError("lengths are pairs of 1 or more tokens")
    return lengths


def main(arguments: list[str]) -> int:
    if len(arguments) != 2:
        sys.stderr.write(USAGE + "\n")
        return 2
    try:
        lengths = _lengths(arguments[1])
    except (OSError, ValueError, TypeError) as error:
        sys.stderr.write(f"{arguments[1]!r} is no list of [prompt, answer]: {error}\n{USAGE}\n")
        return 2
    os.environ.update(ENVIRONMENT)
    # vLLM and what it loads write to stdout; from here on that is stderr.
    with os.fdopen(os.dup(1), "w") as answer:
        os.dup2(2, 1)
        answer.write(json.dumps(measure(Path(arguments[0]), lengths)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
