"""Real runs for benchmarks, and figures from parts of their journals."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rollart.app.run_folder import JOURNAL
from rollart.app.running import RuntimeKind, carry_out, new_run, require, with_model
from rollart.bench.common import say
from rollart.observe.journal import read_journal
from rollart.types import journal as j
from rollart.types.errors import RequestError, RunError
from rollart.types.messages import Role

Tables = Mapping[str, Any]
Events = Sequence[j.JournalEvent]
Cores = Mapping[Role, Sequence[int]]


class Runs:
    """Runs in one folder with a common model, which is built for the first of them."""

    def __init__(self, folder: Path, model: Tables, runtime: RuntimeKind = RuntimeKind.RAY) -> None:
        """`model` is the table to build it from; `runtime` is the default for runs."""
        require(runtime)
        self._folder = folder
        self._to_make = model
        self._model: str | dict[str, Any] | None = None
        self._runtime = runtime

    def journal(
        self, name: str, tables: Tables, runtime: RuntimeKind | None = None, cores: Cores | None = None
    ) -> list[j.JournalEvent]:
        """Carry out a run in a folder of this name and return its journal. `cores` as in `carry_out`."""
        say(f"{name} ...")
        if self._model is None:
            self._model = with_model(new_run({**tables, "model": self._to_make}).config, self._folder).model
        plan = new_run({**tables, "model": self._model})
        folder, _ = carry_out(plan, runtime or self._runtime, self._folder / name, cores)
        return list(read_journal(folder / JOURNAL))


def dedicated_cores() -> Cores:
    """The first core for engines, the second for the trainer; the others, or else both, for everything else."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) < 2:
        raise RequestError("engines and the trainer need a dedicated core each, which requires Linux and two cores")
    engine, trainer, *others = cores
    return {Role.ENGINE: [engine], Role.TRAINER: [trainer]} | dict.fromkeys(
        (Role.ENVIRONMENT, Role.REWARD), others or cores
    )


class TrainedBatch(NamedTuple):
    at: float
    batch: j.BatchClaimed


def trained_batches(events: Events) -> list[TrainedBatch]:
    """Trained batches, step by step."""
    claims = {event.claim: event for event in events if isinstance(event, j.BatchClaimed)}
    return [TrainedBatch(event.at, claims[event.claim]) for event in events if isinstance(event, j.StepTrained)]


class Window(NamedTuple):
    """The steps of a run that count: from the end of the step before them to the end of the last one."""

    began: float
    ended: float
    batches: list[j.BatchClaimed]

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    @property
    def trajectories(self) -> int:
        return sum(len(batch.trajectories) for batch in self.batches)

    def holds(self, event: j.JournalEvent) -> bool:
        return self.began < event.at <= self.ended


def window(events: Events, warm_up: int = 1, cool_down: int = 0) -> Window:
    """All steps except the first `warm_up` and the last `cool_down`."""
    steps = trained_batches(events)
    counted = steps[warm_up : len(steps) - cool_down]
    if not warm_up or not counted:
        raise RunError(
            f"the run trained {len(steps)} steps; without the first {warm_up} and the last {cool_down} none is left"
        )
    return Window(steps[warm_up - 1].at, counted[-1].at, [step.batch for step in counted])


def throughput(events: Events, warm_up: int = 1, cool_down: int = 0) -> float:
    """Trained trajectories per second over the steps that count."""
    counted = window(events, warm_up, cool_down)
    return counted.trajectories / counted.seconds
