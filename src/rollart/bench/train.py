"""`rollart bench train`: training speed of the torch trainer, against a plain padded loop."""

import json as jsonlib
import sys
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from rollart.bench.common import model_configs, read_tables, say, show_figures
from rollart.types.errors import RequestError

LENGTHS = "train.toml"


@dataclass(frozen=True)
class TrainBench:
    """One model size and its batch."""

    name: str
    config: dict[str, Any]
    lengths: tuple[int, ...]
    repeats: int


def train(
    model: Annotated[str, typer.Option(help="One of 1M, 10M, 50M; all by default.")] = "",
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout and nothing else.")] = False,
) -> None:
    """Trained tokens per CPU-second of the torch trainer, on one core. All sizes take several minutes.

    vs_padded: relative to transformers and AdamW on padded micro-batches of 16, in the given order. Models have random
    weights; both sides use float32 and one thread, make the same step and alternate, and the median counts.

    Example: rollart bench train --model 10M --json
    """
    try:
        from rollart.bench.train_run import measure  # here, because importing torch takes seconds
    except ModuleNotFoundError as error:
        raise RequestError(f"{error.name} is not installed; measuring the trainer needs rollart[train]") from None
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
