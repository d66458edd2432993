"""`rollart bench train`: how fast the torch trainer trains, against a plain padded loop."""

import json as jsonlib
import sys
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from rollart.cli.bench_common import model_configs, read_tables, say, show_figures
from rollart.types.errors import RequestError

LENGTHS = "bench_train.toml"


@dataclass(frozen=True)
class TrainBench:
    """One model size and the batch that it is trained on."""

    name: str
    config: dict[str, Any]
    lengths: tuple[int, ...]
    repeats: int


def train(
    model: Annotated[str, typer.Option(help="One of 1M, 10M, 50M; without it, all of them.")] = "",
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout and nothing else.")] = False,
) -> None:
    """Trained tokens per CPU-second of the torch trainer, on one core. All sizes take some minutes.

    vs_padded: against transformers and AdamW on padded micro-batches of 16 as they come. Models have random weights;
    both sides use float32 and one thread, make the same step, take turns, and the median of them counts.

    Example: rollart bench train --model 10M --json
    """
    try:
        from rollart.cli.bench_train_run import measure  # here, because torch takes seconds
    except ModuleNotFoundError as error:
        raise RequestError(f"{error.name} is missing; install rollart[train] to measure the trainer") from None
    benches = load_benches()
    if model and model not in benches:
        raise RequestError(f"--model {model!r} is unknown; use one of {', '.join(benches)}")
    result = {}
    for name in [model] if model else benches:
        say(f"{name} ...")
        result[name] = measure(benches[name], say)
    if json:
        sys.stdout.write(jsonlib.dumps(result) + "\n")
    else:
        show_figures(result)


def load_benches() -> dict[str, TrainBench]:
    """The committed sizes, smallest first."""
    tables = read_tables(LENGTHS)
    lengths = tables["lengths"]
    configs = model_configs(max(lengths))
    return {
        name: TrainBench(name, configs[name], tuple(lengths[: batch["sequences"]]), batch["repeats"])
        for name, batch in tables["batches"].items()
    }
