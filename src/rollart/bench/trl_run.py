"""The two sides of `rollart bench trl`: a run as by `rollart train`, and TRL in its own process.

Both start from the same small model, take the same prompts in the same order and meet the same injected faults, which
depend only on prompt, member and turn. The measured time is from the last optimiser step of the warm-up to the last
one.
"""

import os
import subprocess
import tempfile
from collections.abc import Callable, Collection, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from rollart.app.api import merged
from rollart.app.running import RuntimeKind, carry_out, new_run, require, with_model
from rollart.app.task_checks import prompts_of
from rollart.bench.trl import LATENCY, OURS, THEIRS, WAYS, Order, Part, Played, ScriptOrder, Steps, Way, Work, ratios
from rollart.bench.trl_played import played_in
from rollart.bench.trl_scripts import count_lines, run_script, script_order, write_rows
from rollart.config.injection import Injection
from rollart.config.load import check
from rollart.config.schema import RunConfig
from rollart.types.errors import RequestError, RunError

RELEASE = "1.16"
TASK = "frozenlake"
NO_TRL = "install it there with: pip install 'rollart[trl]', or choose another Python with --python"


def measure(work: Work, python: Path, say: Callable[[str], None], parts: Collection[Part]) -> dict[str, Any]:
    """Run all sides in sequence. Returns the ratios, and the results of every side under `sides`."""
    require(RuntimeKind.RAY)
    check_trl(python)
    played: dict[str, list[Played]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        plain = with_model(check(RunConfig, work.run), Path(scratch))
        runs = chain(
            _episodes(work, plain.model, python, Path(scratch)) if Part.EPISODES in parts else (),
            _dataset(work, str(plain.model), python, Path(scratch)) if Part.DATASET in parts else (),
        )
        for side, run in runs:
            played.setdefault(side, []).append(run())
            say(f"{side}: {_summary(played[side][-1])}")
    return compared(played) | ({"lines": count_lines()} if Part.DATASET in parts else {})


Runs = Iterator[tuple[str, Callable[[], Played]]]
"""Sides in the order in which they run."""


def _episodes(work: Work, model: Any, python: Path, scratch: Path) -> Runs:
    for round_, suffix in enumerate([""] * work.rounds + [LATENCY]):
        tables = merged(work.run, {"model": model} | (work.latency if suffix else {}))
        ours = f"rollart{suffix}"
        yield ours, partial(train_here, tables, work.steps[ours], scratch / f"{ours}-{round_}")
        for way in WAYS:
            order = order_of(check(RunConfig, tables), way, work.steps[way + suffix], work.rows)
            yield way + suffix, partial(train_there, python, order)


def _dataset(work: Work, model: str, python: Path, scratch: Path) -> Runs:
    rows = write_rows(scratch / "rows.jsonl")
    for round_ in range(work.rounds):
        yield OURS, partial(run_script, model, rows, work.steps[OURS], scratch / f"{OURS}-{round_}")
        yield THEIRS, partial(train_there, python, script_order(model, rows, work.steps[THEIRS]))


def compared(played: dict[str, list[Played]]) -> dict[str, Any]:
    """Compare the median round of each side; of an even number, the slower of the two in the middle."""
    middle = {side: sorted(rounds, key=lambda one: one.rate)[(len(rounds) - 1) // 2] for side, rounds in played.items()}
    over = {
        name: middle[ours].rate / middle[theirs].rate for name, (ours, theirs) in ratios().items() if ours in middle
    }
    return over | {
        "sides": {side: one.figures() for side, one in middle.items()},
        "rates": {side: [one.rate for one in rounds] for side, rounds in played.items()},
        "cpu_ms": {side: one.cpu_ms for side, one in middle.items()},
    }


def _summary(played: Played) -> str:
    return (
        f"{played.rate:.1f} trajectories/s, {played.turns:.1f} turns and "
        f"{played.tokens:.1f} tokens each, a step hung in {played.hung:.1%}"
    )


# --- rollart --------------------------------------------------------------------------------------------------------


def train_here(tables: dict[str, Any], steps: Steps, folder: Path) -> Played:
    """Run with Ray, and read the steps that count from its journal."""
    plan = new_run(tables | {"steps": steps.warm_up + steps.counted})
    carry_out(plan, RuntimeKind.RAY, folder)
    return played_in(folder, steps.warm_up, injection_of(plan.config))


def injection_of(config: RunConfig) -> Injection:
    """The injection of the task; at most one is configured."""
    (injection,) = config.tasks[TASK].inject or (Injection(),)
    return injection


# --- TRL ------------------------------------------------------------------------------------------------------------


def check_trl(python: Path) -> None:
    """Refuse a Python without the TRL release that the benchmark was written for."""
    ask = "from importlib.metadata import version; print(version('trl'))"
    try:
        done = subprocess.run([str(python), "-c", ask], capture_output=True, text=True, check=False)
    except OSError as error:
        raise RequestError(f"--python {python}: {error.strerror}; give the Python of an environment with TRL") from None
    if done.returncode:
        raise RequestError(f"{python} has no TRL; {NO_TRL}")
    found = done.stdout.strip()
    if not found.startswith(RELEASE + "."):
        raise RequestError(f"{python} has TRL {found}, but the benchmark needs {RELEASE}; {NO_TRL}")


def order_of(config: RunConfig, way: Way, steps: Steps, rows: int) -> Order:
    """The work of a run, for TRL."""
    task = config.tasks[TASK]
    source = prompts_of(config, TASK, held_out=False)
    return Order(
        way=way,
        model=str(config.model),
        prompts=[source.next() for _ in range((steps.warm_up + steps.counted) * config.groups)],
        groups=config.groups,
        group_size=config.batch.group_size,
        warm_up=steps.warm_up,
        max_turns=task.max_turns,
        max_turn_tokens=task.max_turn_tokens,
        max_context=task.max_context,
        temperature=task.temperature,
        learning_rate=config.trainer.learning_rate,
        rows=rows,
        threads=os.cpu_count() or 1,
        inject=injection_of(config).model_dump(exclude_defaults=True),
    )


def train_there(python: Path, order: Order | ScriptOrder) -> Played:
    """Train in TRL's environment; see `bench.trl_side`."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        file.write(msgspec.json.encode(order))
        file.flush()
        command = [str(python), "-m", "rollart.bench.trl_side", file.name]
        done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        raise RunError(f"TRL's {order.side} failed: {done.stderr.decode(errors='replace').strip()[-500:]}")
    return msgspec.json.decode(done.stdout, type=Played)
