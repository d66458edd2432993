"""`rollart bench trl`: trained trajectories per second, against TRL on the same agentic work."""

import json as jsonlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import typer

from rollart.cli.bench_common import read_tables, say, show_figures
from rollart.types.trajectory import Prompt

WORK = "bench_trl.toml"
Way = Literal["environment_factory", "rollout_func"]
WAYS: tuple[Way, ...] = ("environment_factory", "rollout_func")
LATENCY = "_latency"
"""What names end with that are of the work with latency."""


class Steps(NamedTuple):
    """Of a side: those that do not count, and those that do."""

    warm_up: int
    counted: int


@dataclass(frozen=True)
class Work:
    """What both sides do."""

    run: dict[str, Any]
    """Tables of a run."""
    latency: dict[str, Any]
    """Laid over them for the work with latency."""
    steps: dict[str, Steps]
    """By side: `rollart` or a way of TRL, with latency or without."""
    rows: int
    rounds: int
    """How often every side is measured without latency."""


class Order(msgspec.Struct, kw_only=True, frozen=True):
    """What TRL is to play and to train: see `bench_trl_side`."""

    way: Way
    model: str
    prompts: list[Prompt]
    """One per group, in order; as many as all steps need."""
    groups: int
    """Per batch."""
    group_size: int
    warm_up: int
    """Steps that do not count; at least one."""
    max_turns: int
    max_turn_tokens: int
    max_context: int
    temperature: float
    learning_rate: float
    rows: int
    """Of one forward and backward pass."""
    threads: int
    """That torch computes with."""
    inject: dict[str, Any]

    @property
    def trajectories(self) -> int:
        """Per batch."""
        return self.groups * self.group_size

    @property
    def steps(self) -> int:
        return len(self.prompts) // self.groups


class Played(msgspec.Struct, kw_only=True, frozen=True):
    """What a side did after its warm-up. Means are of trained trajectories."""

    trajectories: int
    seconds: float
    turns: float
    """Answers."""
    tokens: float
    """Sampled ones."""
    hung: float
    """The share in which a reset or a step hung."""
    cpu_ms: dict[str, float]
    """Of the processors per trained trajectory, by what the processes are."""

    @property
    def rate(self) -> float:
        """Trajectories per second."""
        return self.trajectories / self.seconds

    def figures(self) -> dict[str, float]:
        rest = {name: getattr(self, name) for name in ("turns", "tokens", "hung", "trajectories", "seconds")}
        return {"trajectories_per_s": self.rate, **rest}


def trl(
    python: Annotated[
        Path, typer.Option(help="The Python of an environment with rollart and TRL 1.16; without it, this one.")
    ] = Path(sys.executable),
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout and nothing else.")] = False,
) -> None:
    """Trained trajectories per second of a whole run, against TRL 1.16. Takes many minutes.

    FrozenLake in text, at most 8 turns of at most 16 tokens, groups of 8, batches of 64, a model of 0.9 M parameters in
    float32; one optimiser step and one pass for log-probabilities per batch. Against TRL's own loop
    (over_environment_factory) and against what a skilled user writes in its rollout_func (over_rollout_func): first as
    it is, then with environments that take 50 ms in the mean, where 1 % of the steps hang for 5 s (…_latency). Such
    steps return and are trained on by all. Sides run one after the other, each with all cores; without latency, where
    a machine that is shared makes the most difference, in three rounds, of which the median of each side counts.

    TRL rolls out and trains in turn. rollart does both at once, on trajectories that are some updates old: in mode
    rollart with alpha 1, and with latency in mode areal with alpha 4. That is part of the difference.

    rates: trajectories per second, round by round. cpu_ms: what a trained trajectory costs of the processors, by
    process; on our side with the warm-up.

    Example: rollart bench trl --json
    """
    from rollart.cli.bench_trl_run import measure  # here: Gymnasium and the parts of a real run

    result = measure(load_work(), python, say)
    if json:
        sys.stdout.write(jsonlib.dumps(result) + "\n")
        return
    show_figures(result["sides"])
    for name in ratios():
        sys.stdout.write(f"{name}: {result[name]:.1f}\n")
    for side, spent in result["cpu_ms"].items():
        told = ", ".join(f"{role} {ms:.1f}" for role, ms in spent.items())
        sys.stdout.write(f"{side}: {sum(spent.values()):.1f} ms of CPU per trajectory ({told})\n")


def load_work() -> Work:
    """As committed."""
    tables = read_tables(WORK)
    steps = {side: Steps(*counts) for side, counts in tables["steps"].items()}
    return Work(tables["run"], tables["latency"], steps, tables["rows"], tables["rounds"])


def ratios() -> dict[str, tuple[str, str]]:
    """The figures of the bench, and which side is divided by which.

    >>> ratios()["over_rollout_func_latency"]
    ('rollart_latency', 'rollout_func_latency')
    """
    return {f"over_{way}{suffix}": (f"rollart{suffix}", way + suffix) for suffix in ("", LATENCY) for way in WAYS}
