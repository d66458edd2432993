"""The runs of `rollart bench modes`, and figures from their journals."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rollart.app.api import merged
from rollart.app.running import RuntimeKind
from rollart.bench.modes import WITHOUT
from rollart.bench.runs import Events, Runs, Tables, dedicated_cores, window
from rollart.config.modes import Mode
from rollart.control.trainer import POOL as TRAINER
from rollart.types import journal as j
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


def measure(tables: Tables, folder: Path, runtime: RuntimeKind = RuntimeKind.RAY) -> dict[str, Any]:
    """All modes, with latency and without. Runs are sequential and kept in `folder`."""
    runs = Runs(folder, tables["model"], runtime)
    cores = dedicated_cores()
    steps = {Mode(mode): Steps(*counts) for mode, counts in tables["steps"].items()}

    def compare(suffix: str, work: Tables) -> dict[str, Any]:
        figures = {}
        for mode in Mode:
            run = {**work, "mode": mode.value, "steps": sum(steps[mode])}
            figures[mode] = figures_of(runs.journal(mode.value + suffix, run, cores=cores), steps[mode])
        return compared(figures)

    return compare("", with_latency(tables)) | {WITHOUT: compare("_" + WITHOUT, tables["run"])}


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
    )


def compared(modes: Mapping[Mode, Figures]) -> dict[str, Any]:
    """Mode rollart against the others, and against a perfect pipeline.

    The time of a stage is the shorter one of rollart and sync_plus: the former may share a core with other processes,
    and the latter computes small batches while it waits for stragglers.
    """
    ours, plus = modes[Mode.ROLLART], modes[Mode.SYNC_PLUS]
    perfect_s = max(min(ours.generation_s, plus.generation_s), min(ours.training_s, plus.training_s))
    over = {
        f"rollart_over_{mode.value}": ours.trajectories_per_s / figures.trajectories_per_s
        for mode, figures in modes.items()
        if mode is not Mode.ROLLART
    }
    bound = plus.step_s / perfect_s
    return {
        **over,
        "bound": bound,
        "of_bound": over["rollart_over_sync_plus"] / bound,
        "engine_busy": ours.engine_busy,
        "sync_share": ours.sync_share,
        "modes": {mode.value: figures._asdict() for mode, figures in modes.items()},
    }
