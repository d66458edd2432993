"""Shared parts of the micro-benchmarks: models, progress output, result table."""

import sys
import tomllib
from importlib import resources
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table


def read_tables(file: str) -> dict[str, Any]:
    """Parse a TOML file of this folder."""
    return tomllib.loads(resources.files("rollart.bench").joinpath(file).read_text(encoding="utf-8"))


def model_configs(longest: int) -> dict[str, dict[str, Any]]:
    """The committed sizes, smallest first, for sequences of up to `longest` tokens."""
    common = {"model_type": "qwen3", "tie_word_embeddings": True, "max_position_embeddings": longest}
    return {name: common | config for name, config in read_tables("models.toml").items()}


def say(text: str) -> None:
    """Write a line of progress to stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def show_figures(result: dict[str, dict[str, float]]) -> None:
    """Print a row per figure and a column per size."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("figure")
    for name in result:
        table.add_column(name, justify="right")
    for key in next(iter(result.values())):
        table.add_row(key, *[f"{figures[key]:,.2f}" for figures in result.values()])
    Console().print(table)
