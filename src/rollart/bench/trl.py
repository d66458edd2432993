"""`rollart bench trl`: trained trajectories per second, against TRL on the same agentic work."""

import json as jsonlib
import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import typer

from rollart.bench.common import read_tables, say, show_figures
from rollart.types.trajectory import Prompt

WORK = "trl.toml"
Way = Literal["environment_factory", "rollout_func"]
WAYS: tuple[Way, ...] = ("environment_factory", "rollout_func")
LATENCY = "_latency"
"""Suffix of names of the work with latency."""
OURS, THEIRS = "rollart_dataset", "trl_dataset"
"""The sides of the dataset with a reward."""


class Part(StrEnum):
    """What is compared."""

    EPISODES = "episodes"
    """FrozenLake, with latency and without."""
    DATASET = "dataset"
    """Rows and a reward, as scripts of a user."""


class Steps(NamedTuple):
    """Steps of a side: warm-up, and those that count."""

    warm_up: int
    counted: int


@dataclass(frozen=True)
class Work:
    """The work of both sides."""

    run: dict[str, Any]
    """Tables of a run."""
    latency: dict[str, Any]
    """Overrides for the work with latency."""
    steps: dict[str, Steps]
    """By side: `rollart` or a way of TRL, with latency or without, and the sides of the dataset."""
    rows: int
    rounds: int
    """Number of measurements of every side without latency."""


class ScriptOrder(msgspec.Struct, kw_only=True, frozen=True, tag=True):
    """What TRL's script of the dataset has to train; see `bench.snippets`."""

    model: str
    rows: str
    """File with the dataset."""
    steps: int
    warm_up: int
    threads: int
    """Number of torch threads."""

    @property
    def side(self) -> str:
        return THEIRS


class Order(msgspec.Struct, kw_only=True, frozen=True, tag=True):
    """What TRL has to play and train; see `bench.trl_side`."""

    way: Way
    model: str
    prompts: list[Prompt]
    """One per group, in order; enough for all steps."""
    groups: int
    """Groups per batch."""
    group_size: int
    warm_up: int
    """Steps that do not count; at least one."""
    max_turns: int
    max_turn_tokens: int
    max_context: int
    temperature: float
    learning_rate: float
    rows: int
    """Rows per forward and backward pass."""
    threads: int
    """Number of torch threads."""
    inject: dict[str, Any]

    @property
    def side(self) -> str:
        return self.way

    @property
    def trajectories(self) -> int:
        """Trajectories per batch."""
        return self.groups * self.group_size

    @property
    def steps(self) -> int:
        return len(self.prompts) // self.groups


class Played(msgspec.Struct, kw_only=True, frozen=True):
    """Results of a side after its warm-up. Means are over trained trajectories."""

    trajectories: int
    seconds: float
    turns: float
    """Mean number of answers."""
    tokens: float
    """Mean number of sampled tokens."""
    hung: float
    """Share of trajectories in which a reset or a step hung."""
    cpu_ms: dict[str, float]
    """CPU time per trained trajectory, by kind of process."""

    @property
    def rate(self) -> float:
        """Trajectories per second."""
        return self.trajectories / self.seconds

    def figures(self) -> dict[str, float]:
        rest = {name: getattr(self, name) for name in ("turns", "tokens", "hung", "trajectories", "seconds")}
        return {"trajectories_per_s": self.rate, **rest}


def trl(
    python: Annotated[
        Path, typer.Option(help="Python of an environment with rollart and TRL 1.16; this one by default.")
    ] = Path(sys.executable),
    part: Annotated[Part | None, typer.Option(help="Compare only this; everything by default.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout and nothing else.")] = False,
) -> None:
    """Trained trajectories per second of a whole run, against TRL 1.16. Takes many minutes.

    FrozenLake in text, at most 8 turns of at most 16 tokens, groups of 8, batches of 64, a model of 0.9 M parameters in
    float32; one optimiser step and one pass for log-probabilities per batch. Compared with TRL's own loop
    (over_environment_factory) and with what a skilled user writes in its rollout_func (over_rollout_func): first as it
    is, then with environments that take 50 ms on average, where 1 % of the steps hang for 5 s (…_latency). Such steps
    return and are trained on by all sides. Sides run one after the other, each with all cores; without latency, where a
    shared machine makes the most difference, in three rounds, of which the median of each side counts.

    Besides, a dataset with a reward (…_dataset), in three rounds: two scripts as users write them, with the same rows,
    reward, model, batches of 64 in groups of 8, answers of at most 12 tokens and learning rate. lines: those of each
    script that are neither blank nor comment nor docstring, in ruff's format, 120 columns wide. Groups with equal
    rewards, about four of ten, cost TRL a backward pass and rollart none.

    TRL alternates rollout and training. rollart does both at once, on trajectories that are a few updates old: in mode
    rollart with alpha 2 (dataset: 1, the default), and with latency in mode areal with alpha 4. That is part of the
    difference.

    rates: trajectories per second, by round. cpu_ms: CPU time per trained trajectory, by process; on rollart's side
    including the warm-up.

    Example: rollart bench trl --json
    """
    from rollart.bench.trl_run import measure  # here: Gymnasium and the parts of a real run

    result = measure(load_work(), python, say, [part] if part else list(Part))
    if json:
        sys.stdout.write(jsonlib.dumps(result) + "\n")
        return
    show_figures(result["sides"])
    for name in ratios():
        if name in result:
            sys.stdout.write(f"{name}: {result[name]:.1f}\n")
    for name, lines in result.get("lines", {}).items():
        sys.stdout.write(f"dataset and reward in {name}: {lines} lines\n")
    for side, spent in result["cpu_ms"].items():
        by_role = ", ".join(f"{role} {ms:.1f}" for role, ms in spent.items())
        sys.stdout.write(f"{side}: {sum(spent.values()):.1f} ms of CPU per trajectory ({by_role})\n")


def load_work() -> Work:
    """The committed work."""
    tables = read_tables(WORK)
    steps = {side: Steps(*counts) for side, counts in tables["steps"].items()}
    return Work(tables["run"], tables["latency"], steps, tables["rows"], tables["rounds"])


def ratios() -> dict[str, tuple[str, str]]:
    """The figures of the benchmark, and the sides that each divides.

    >>> ratios()["over_rollout_func_latency"]
    ('rollart_latency', 'rollout_func_latency')
    """
    ways = {f"over_{way}{suffix}": (f"rollart{suffix}", way + suffix) for suffix in ("", LATENCY) for way in WAYS}
    return ways | {"over_dataset": (OURS, THEIRS)}
