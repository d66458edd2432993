"""The runs of `rollart bench modes`, and figures from their journals."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rollart.app.api import merged
from rollart.app.running import RuntimeKind
from rollart.bench.modes import WITHOUT
from rollart.bench.runs import Events, Runs, Tables, dedicated_cores, window
from rollart.config.modes import Mode
from rollart.config.suggest import did_you_mean
from rollart.control.trainer import POOL as TRAINER
from rollart.observe.bias import BiasFold
from rollart.observe.report import ReportFold
from rollart.types import journal as j
from rollart.types.errors import RequestError
from rollart.types.messages import Role
from rollart.types.trajectory import GroupOutcome


class Steps(NamedTuple):
    """Steps of a run: those that count, and those that do not, before and after them."""

    warm_up: int
    counted: int
    cool_down: int


class Figures(NamedTuple):
    """Figures of the steps that count. Seconds are per step."""

    step_s: float
    trajectories_per_s: float
    generation_s: float
    """Time the engine spent in steps, by its own clock, for trained tokens, excluding recomputation of KV after
    updates."""
    training_s: float
    engine_busy: float
    """Share of time in which the engine took steps of any kind."""
    sync_share: float
    """Share of time in which weight syncs suspended it."""
    stale_share: float
    """Share of the groups that ended."""
    wasted: float
    """Share of the sampled tokens that were not trained."""


class Measured:
    """Figures of a row of the table over all rounds, and what its runs offered and trained."""

    def __init__(self) -> None:
        self.rounds: list[Figures] = []
        self.prompts = BiasFold()
        self.members = BiasFold()

    def add(self, events: Events, steps: Steps) -> None:
        self.rounds.append(figures_of(events, steps))
        fold = ReportFold()
        for event in events:
            fold.take(event)
        fold.finish()
        for own, others in ((self.prompts, fold.prompts), (self.members, fold.members)):
            for each in others.values():
                own.merge(each)

    def median(self) -> Figures:
        return Figures(*map(statistics.median, zip(*self.rounds, strict=True)))

    def bias(self) -> dict[str, Any]:
        return {
            name: {quantity: msgspec.structs.asdict(each) for quantity, each in fold.compared().items()}
            for name, fold in (("prompts", self.prompts), ("members", self.members))
        }


def measure(
    tables: Tables,
    folder: Path,
    runtime: RuntimeKind = RuntimeKind.RAY,
    rounds: int | None = None,
    only: Sequence[str] = (),
) -> dict[str, Any]:
    """All modes and variants, with latency and without. Runs are sequential and kept in `folder`.

    `only`: rows to run, those without latency by names such as `areal_latency_0`; all if empty.
    """
    runs = Runs(folder, tables["model"], runtime)
    cores = dedicated_cores()
    steps = {Mode(mode): Steps(*counts) for mode, counts in tables["steps"].items()}
    modes: Tables = {mode.value: {"mode": mode.value} for mode in Mode}
    variants: Tables = {**modes, **tables.get("variants", {})}
    known = [*variants, *(f"{mode}_{WITHOUT}" for mode in modes)]
    for name in only:
        if name not in known:
            raise RequestError(f"there is no row {name!r}{did_you_mean(name, known)}")

    def compare(suffix: str, work: Tables, rows: Tables) -> dict[str, Any]:
        rows = {row: changes for row, changes in rows.items() if not only or f"{row}{suffix}" in only}
        measured = {row: Measured() for row in rows}
        for number in range(tables.get("rounds", 1) if rounds is None else rounds):
            for row, changes in rows.items():
                run = merged(work, changes)
                counted = steps[Mode(run.get("mode", Mode.ROLLART.value))]
                run["steps"] = sum(counted)
                measured[row].add(runs.journal(f"{row}{suffix}-{number}", run, cores=cores), counted)
        return compared(measured)

    return compare("", with_latency(tables), variants) | {WITHOUT: compare("_" + WITHOUT, tables["run"], modes)}


def with_latency(tables: Tables) -> dict[str, Any]:
    run: dict[str, Any] = tables["run"]
    return merged(run, {"tasks": {task: {"inject": tables["latency"]} for task in run["tasks"]}})


def figures_of(events: Events, steps: Steps) -> Figures:
    counted = window(events, steps.warm_up, steps.cool_down)
    within = [event for event in events if counted.holds(event)]
    engine_pools = {event.pool for event in events if isinstance(event, j.WorkerSpawned) and event.role is Role.ENGINE}
    pools = [event for event in within if isinstance(event, j.PoolTime)]
    engines = [event for event in pools if event.pool in engine_pools]
    stepping_s = sum(event.stepping_s for event in engines)
    useful_s = stepping_s - sum(event.recompute_s for event in engines)
    training_s = sum(event.seconds.get(j.TimeUse.BUSY, 0.0) for event in pools if event.pool == TRAINER)
    suspended_s = sum(event.suspended_s for event in within if isinstance(event, j.WeightsSynced))
    ends = {event.trajectory: event for event in events if isinstance(event, j.TrajectoryEnded)}
    trained = sum(ends[id].sampled for batch in counted.batches for id in batch.trajectories)
    sampled = sum(event.sampled for event in within if isinstance(event, j.TurnEnded | j.TurnAborted))
    groups = [event.outcome for event in within if isinstance(event, j.GroupEnded)]
    return Figures(
        step_s=counted.seconds / len(counted.batches),
        trajectories_per_s=counted.trajectories / counted.seconds,
        generation_s=useful_s * min(1.0, trained / sampled) / len(counted.batches),
        training_s=training_s / len(counted.batches),
        engine_busy=stepping_s / sum(sum(event.seconds.values()) for event in engines),
        sync_share=suspended_s / counted.seconds,
        stale_share=groups.count(GroupOutcome.STALE) / len(groups),
        wasted=1.0 - min(1.0, trained / sampled),
    )


def compared(measured: Mapping[str, Measured]) -> dict[str, Any]:
    """Mode rollart against the others, and against a perfect pipeline; medians of all rounds.

    What needs a row that was not run is left out. The time of a stage is the shorter one of rollart and sync_plus: the
    former may share a core with other processes, and the latter computes small batches while it waits for stragglers.
    """
    rows = {row: each.median() for row, each in measured.items()}
    return {
        **_ratios(rows),
        "modes": {row: figures._asdict() for row, figures in rows.items()},
        "rates": {row: [each.trajectories_per_s for each in found.rounds] for row, found in measured.items()},
        "bias": {row: found.bias() for row, found in measured.items()},
    }


def _ratios(rows: Mapping[str, Figures]) -> dict[str, float]:
    ours, plus = rows.get(Mode.ROLLART.value), rows.get(Mode.SYNC_PLUS.value)
    if ours is None:
        return {}
    found = {
        f"rollart_over_{row}": ours.trajectories_per_s / figures.trajectories_per_s
        for row, figures in rows.items()
        if row != Mode.ROLLART.value
    }
    if plus is not None:
        perfect_s = max(min(ours.generation_s, plus.generation_s), min(ours.training_s, plus.training_s))
        bound = plus.step_s / perfect_s
        found |= {"bound": bound, "of_bound": found["rollart_over_sync_plus"] / bound}
    return {**found, "engine_busy": ours.engine_busy, "sync_share": ours.sync_share}
