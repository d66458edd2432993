"""`rollart bench engine`: generation speed of the torch engine, against `transformers.generate` and the hardware."""

import json as jsonlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from rollart.bench.common import model_configs, read_tables, say, show_figures
from rollart.types.errors import RequestError

LENGTHS = "engine.toml"
VLLM_PYTHON = Path(".venv-vllm/bin/python")


@dataclass(frozen=True)
class Turn:
    """Numbers of new tokens and of tokens to generate."""

    new: int
    answer: int


@dataclass(frozen=True)
class Workload:
    """Trajectories, each a list of turns; the first turn's new tokens are its prompt."""

    trajectories: tuple[tuple[Turn, ...], ...]

    @property
    def tokens(self) -> int:
        """Number of generated tokens."""
        return sum(turn.answer for turns in self.trajectories for turn in turns)

    def first(self, count: int) -> "Workload":
        return Workload(self.trajectories[:count])


@dataclass(frozen=True)
class Bench:
    """One model size and its workloads."""

    name: str
    config: dict[str, Any]
    repeats: int
    single: Workload
    multi: Workload


def engine(
    model: Annotated[str, typer.Option(help="One of 1M, 3M, 10M, 50M; all by default.")] = "",
    vllm: Annotated[Path, typer.Option(help="Python of an environment with vLLM: `make venv-vllm`.")] = VLLM_PYTHON,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout and nothing else.")] = False,
) -> None:
    """Tokens per CPU-second of the torch engine, on one core. All sizes take several minutes.

    Compared with `transformers.generate` at batches of 1, 16 and 64 and on 64 trajectories of 2 to 8 turns
    (vs_generate_…), with the time of the matrix products alone plus reading the KV at memory bandwidth
    (limit_share_b64), and with vLLM if its environment exists (vs_vllm_b64). Models have random weights; all sides use
    float32 and one thread. The engine and `generate` alternate, and the median counts.

    Example: rollart bench engine --model 10M --json
    """
    try:
        from rollart.bench.engine_run import measure
    except ModuleNotFoundError as error:
        raise RequestError(f"{error.name} is not installed; measuring the engine needs rollart[train]") from None
    benches = load_benches()
    if model and model not in benches:
        raise RequestError(f"--model {model!r} is unknown; use one of {', '.join(benches)}")
    result = {}
    for name in [model] if model else benches:
        say(f"{name} ...")
        result[name] = measure(benches[name], say, vllm if vllm.is_file() else None)
    if json:
        sys.stdout.write(jsonlib.dumps(result) + "\n")
    else:
        show_figures(result)


def load_benches() -> dict[str, Bench]:
    """The committed sizes, smallest first."""
    tables = read_tables(LENGTHS)
    single = tables["single"]
    one_turn = Workload(
        tuple((Turn(new, answer),) for new, answer in zip(single["prompts"], single["answers"], strict=True))
    )
    multi = Workload(tuple(tuple(Turn(*turn) for turn in turns) for turns in tables["multi"]["trajectories"]))
    longest = max(sum(turn.new + turn.answer for turn in turns) for turns in multi.trajectories)
    return {
        name: Bench(name, config, tables["repeats"][name], one_turn, multi)
        for name, config in model_configs(2 * longest).items()
    }
