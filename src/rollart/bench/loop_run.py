"""The runs of `rollart bench loop`, and figures computed from their journals alone."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rollart.app.running import RuntimeKind, require
from rollart.bench.loop import Part
from rollart.bench.runs import Events, Runs, Tables, throughput, trained_batches
from rollart.config.injection import Injection
from rollart.control.trainer import POOL as TRAINER
from rollart.observe.report import make_report
from rollart.policy.seeds import member_key
from rollart.types import journal as j
from rollart.types.errors import RunError
from rollart.types.failures import FailureKind
from rollart.types.ids import GroupId, TrajectoryId
from rollart.types.trajectory import FAILURES, TRAINABLE, Prompt


class Bench:
    """All measurements, with one model."""

    def __init__(self, tables: Tables, folder: Path, runtime: RuntimeKind = RuntimeKind.RAY) -> None:
        """`runtime` is used by the parts that do not compare runtimes."""
        for kind in RuntimeKind:
            require(kind)
        self._tables = tables
        self._runs = Runs(folder, tables["model"], runtime)

    def measure(self, part: Part) -> dict[str, Any]:
        work = self._tables[part.value]
        match part:
            case Part.BAD:
                return self._bad(work["run"], work["inject"])
            case Part.BUSY:
                return busy_figures(self._runs.journal("busy", work["run"]))
            case Part.RUNTIMES:
                return self._runtimes(work["run"], work["seeds"])

    def _bad(self, run: Tables, inject: Sequence[Tables]) -> dict[str, Any]:
        ((name, task),) = run["tasks"].items()
        worse = task | {"inject": [*task["inject"], *inject]}
        clean = self._runs.journal("clean", run)
        bad = self._runs.journal("bad", {**run, "tasks": {name: worse}})
        injections = [Injection.model_validate(each) for each in inject]
        return bad_figures(clean, bad, injections, environments=task["environments"])

    def _runtimes(self, run: Tables, seeds: Sequence[int]) -> dict[str, Any]:
        journals = {
            kind: {seed: self._runs.journal(f"{kind}-{seed}", {**run, "seed": seed}, kind) for seed in seeds}
            for kind in RuntimeKind
        }
        return runtime_figures(journals[RuntimeKind.INLINE], journals[RuntimeKind.RAY])


# --- bad environments -----------------------------------------------------------------------------------------------


def bad_figures(clean: Events, bad: Events, injections: Sequence[Injection], *, environments: int) -> dict[str, Any]:
    """Throughput with the injections relative to that without, and what became of the affected trajectories."""
    broken = {slot for injection in injections for slot in injection.bad_slots or ()}
    ratio = throughput(bad) / throughput(clean)
    return {
        "bad_over_clean": ratio,
        "bad_over_share": ratio / (1 - len(broken) / environments),
        "trained_failures": trained_failures(bad, injections),
        "failures": failures(bad),
        "clean_failures": failures(clean),
        "clean_trajectories_per_s": throughput(clean),
        "bad_trajectories_per_s": throughput(bad),
    }


def trained_failures(events: Events, injections: Sequence[Injection]) -> int:
    """Trained trajectories that failed, judged by their outcome or by where they ran.

    The latter finds failures that were given a reward nevertheless: no episode completes in an environment that hangs
    forever, or past a turn in which it raises.
    """
    slots = {e.trajectory: int(e.environment.rpartition("#")[2]) for e in events if isinstance(e, j.TrajectoryStarted)}
    ends = {e.trajectory: e for e in events if isinstance(e, j.TrajectoryEnded)}
    trained = [ends[id] for step in trained_batches(events) for id in step.batch.trajectories]
    return sum(
        end.outcome not in TRAINABLE or any(_stops(each, slots[end.trajectory], end.turns) for each in injections)
        for end in trained
    )


def _stops(injection: Injection, slot: int, turns: int) -> bool:
    """Whether no episode with this many turns in this slot can have completed."""
    if injection.bad_slots is not None and slot not in injection.bad_slots:
        return False
    hangs = injection.hang_share == 1.0 and injection.hang_s is None
    return hangs or (injection.raise_every is not None and turns >= injection.raise_every)


def failures(events: Events) -> dict[str, int]:
    """Failed trajectories by outcome, and whether the failure was reported or timed out."""
    causes = Counter(
        f"{event.outcome.value}: {'timed out' if event.failure is FailureKind.DEADLINE else 'reported'}"
        for event in events
        if isinstance(event, j.TrajectoryEnded) and event.outcome in FAILURES
    )
    return dict(sorted(causes.items()))


# --- busy engines ---------------------------------------------------------------------------------------------------


def busy_figures(events: Events) -> dict[str, Any]:
    """How the engines spent their time, excluding start and end (`Steady`)."""
    report = make_report(events)
    steady = report.steady
    return {
        "engine_busy": steady.stepping,
        "engine_has_requests": {pool: steady.busy[pool] for pool in report.engines if pool in steady.busy},
        "sync_share": steady.suspended,
        "recompute_share": steady.recompute,
        "trainer_busy": steady.busy.get(TRAINER, 0.0),
        "step_s": report.step_s,
    }


# --- two runtimes ---------------------------------------------------------------------------------------------------


def runtime_figures(inline: Mapping[int, Events], ray: Mapping[int, Events]) -> dict[str, Any]:
    """Compare the journals of both runtimes by seed: which members were trained, and the resulting success."""
    scores = {
        kind.value: {str(seed): held_out(events) for seed, events in journals.items()}
        for kind, journals in ((RuntimeKind.INLINE, inline), (RuntimeKind.RAY, ray))
    }
    points = [100 * (held_out(ray[seed]) - held_out(inline[seed])) for seed in inline]
    return {
        "same_assignment": all(assignment(inline[seed]) == assignment(ray[seed]) for seed in inline),
        "held_out": scores,
        "mean_difference_points": statistics.fmean(points),
        "largest_difference_points": max(map(abs, points)),
    }


class Member(NamedTuple):
    """A trained trajectory, identified by its request; the seeds of its turns derive from `seed`."""

    task: str
    prompt: str
    prompt_seed: int
    attempt: int
    number: int
    seed: int


def assignment(events: Events) -> list[list[list[Member]]]:
    """For every trained step its groups, and for every group its members; both sorted, not in order of completion."""
    run_seed = next(event.seed for event in events if isinstance(event, j.RunStarted))
    prompts: dict[int, Prompt] = {e.ticket: e.prompt for e in events if isinstance(e, j.PromptTaken)}
    groups: dict[GroupId, j.GroupOpened] = {e.group: e for e in events if isinstance(e, j.GroupOpened)}
    starts: dict[TrajectoryId, j.TrajectoryStarted] = {
        e.trajectory: e for e in events if isinstance(e, j.TrajectoryStarted)
    }

    def member(id: TrajectoryId) -> Member:
        start = starts[id]
        prompt = prompts[groups[start.group].ticket]
        seed = member_key(run_seed, prompt.seed, start.member)
        return Member(prompt.task, prompt.id, prompt.seed, start.attempt, start.member, seed)

    return [
        sorted(
            sorted(member(id) for id in step.batch.trajectories if starts[id].group == group)
            for group in step.batch.groups
        )
        for step in trained_batches(events)
    ]


def held_out(events: Events) -> float:
    """Success of the last evaluation, over all tasks."""
    rounds = [event for event in events if isinstance(event, j.EvalEnded)]
    scores = [each.mean_reward for each in rounds if each.step == rounds[-1].step and each.mean_reward is not None]
    if not scores:
        raise RunError("no held-out episode ended with a reward, so there is nothing to compare; see the journal")
    return statistics.fmean(scores)
