"""The two sides of `rollart bench trl`: a run as by `rollart train`, and TRL in its own process.

Both start from the same small model, take the same prompts in the same order and meet the same injected faults, which
depend only on prompt, member and turn. The measured time is from the last optimiser step of the warm-up to the last
one.
"""

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from rollart.app.api import merged
from rollart.app.run_folder import JOURNAL
from rollart.app.running import CPU, RuntimeKind, carry_out, new_run, require, with_model
from rollart.app.task_checks import prompts_of
from rollart.backends.environments.inject import hangs
from rollart.bench.trl import LATENCY, WAYS, Order, Played, Steps, Way, Work, ratios
from rollart.config.injection import Injection
from rollart.config.load import check
from rollart.config.schema import RunConfig
from rollart.observe.journal import read_journal
from rollart.types import journal as j
from rollart.types.errors import RequestError, RunError
from rollart.types.ids import ClaimId, GroupId, TrajectoryId

RELEASE = "1.16"
TASK = "frozenlake"
NO_TRL = "install it there with: pip install 'rollart[trl]', or choose another Python with --python"


def measure(work: Work, python: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Run all sides in sequence. Returns the ratios, and the results of every side under `sides`."""
    require(RuntimeKind.RAY)
    check_trl(python)
    played: dict[str, list[Played]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        plain = with_model(check(RunConfig, work.run), Path(scratch))
        for round_, suffix in enumerate([""] * work.rounds + [LATENCY]):
            tables = merged(work.run, {"model": plain.model} | (work.latency if suffix else {}))
            for way in (None, *WAYS):
                side = (way or "rollart") + suffix
                if way is None:
                    done = train_here(tables, work.steps[side], Path(scratch) / f"{side}-{round_}")
                else:
                    done = train_there(python, order_of(check(RunConfig, tables), way, work.steps[side], work.rows))
                played.setdefault(side, []).append(done)
                say(f"{side}: {_summary(done)}")
    return compared(played)


def compared(played: dict[str, list[Played]]) -> dict[str, Any]:
    """Compare the median round of each side; of an even number, the slower of the two in the middle."""
    middle = {side: sorted(rounds, key=lambda one: one.rate)[(len(rounds) - 1) // 2] for side, rounds in played.items()}
    over = {name: middle[ours].rate / middle[theirs].rate for name, (ours, theirs) in ratios().items()}
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
    spent_s = msgspec.json.decode((folder / CPU).read_bytes(), type=dict[str, float])
    trained = plan.config.steps * plan.config.batch.trajectories
    cpu_ms = {role: 1e3 * seconds / trained for role, seconds in spent_s.items()}
    return played_here(read_journal(folder / JOURNAL), steps.warm_up, injection_of(plan.config), cpu_ms)


def injection_of(config: RunConfig) -> Injection:
    """The injection of the task; at most one is configured."""
    (injection,) = config.tasks[TASK].inject or (Injection(),)
    return injection


def played_here(
    events: Iterable[j.JournalEvent], warm_up: int, injection: Injection, cpu_ms: dict[str, float]
) -> Played:
    """Results from the journal of a run, for trajectories trained after the warm-up."""
    ended_at: list[float] = []
    trained: list[ClaimId] = []
    members: dict[ClaimId, tuple[TrajectoryId, ...]] = {}
    ends: dict[TrajectoryId, j.TrajectoryEnded] = {}
    started: dict[TrajectoryId, j.TrajectoryStarted] = {}
    tickets: dict[GroupId, int] = {}
    seeds: dict[int, int] = {}
    for event in events:
        match event:
            case j.PromptTaken():
                seeds[event.ticket] = event.prompt.seed
            case j.GroupOpened():
                tickets[event.group] = event.ticket
            case j.TrajectoryStarted():
                started[event.trajectory] = event
            case j.TrajectoryEnded():
                ends[event.trajectory] = event
            case j.BatchClaimed():
                members[event.claim] = event.trajectories
            case j.StepTrained():
                ended_at.append(event.at)
                trained.append(event.claim)

    def hung(trajectory: TrajectoryId) -> bool:
        start = started[trajectory]
        seed = seeds[tickets[start.group]]
        return any(hangs(injection, seed, start.member, turn) for turn in range(ends[trajectory].turns + 1))

    counted = [trajectory for claim in trained[warm_up:] for trajectory in members[claim]]
    return Played(
        trajectories=len(counted),
        seconds=ended_at[-1] - ended_at[warm_up - 1],
        turns=sum(ends[each].turns for each in counted) / len(counted),
        tokens=sum(ends[each].sampled for each in counted) / len(counted),
        hung=sum(map(hung, counted)) / len(counted),
        cpu_ms=cpu_ms,
    )


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


def train_there(python: Path, order: Order) -> Played:
    """Train in TRL's environment; see `bench.trl_side`."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        file.write(msgspec.json.encode(order))
        file.flush()
        command = [str(python), "-m", "rollart.bench.trl_side", file.name]
        done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        raise RunError(f"TRL's {order.way} failed: {done.stderr.decode(errors='replace').strip()[-500:]}")
    return msgspec.json.decode(done.stdout, type=Played)
