"""The runs of `rollart bench affinity`, and figures from their journals."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rollart.app.api import merged
from rollart.app.running import RuntimeKind
from rollart.bench.common import say
from rollart.bench.runs import Events, Runs, Tables, throughput
from rollart.observe.report import Report, make_report
from rollart.sim.run import simulate
from rollart.sim.scenario import load_scenario
from rollart.types import journal as j

AUTO = "auto"
Classes = Mapping[str, str]
"""Class of every task."""


class Moves(NamedTuple):
    """What became of the classes of a run."""

    assigned_by_step: int | None
    """The step during which the tasks first had one of the right assignments; None if they never had."""
    later: int
    """Tasks that moved after the warm-up."""
    last: dict[str, str]


def measure(
    tables: Tables, folder: Path, runtime: RuntimeKind = RuntimeKind.RAY, rounds: int | None = None
) -> dict[str, Any]:
    """All rows in turn, then the run in which the pools change places. Runs are sequential and kept in `folder`."""
    runs = Runs(folder, tables["model"], runtime)
    steps = tables["steps"]
    good, bad = _rows("good", tables), _rows("bad", tables)
    rows = {AUTO: {}, **good, **bad}
    rates: dict[str, list[float]] = {row: [] for row in rows}
    moves = []
    for number in range(tables.get("rounds", 1) if rounds is None else rounds):
        for row, changes in rows.items():
            counted = sum(steps[name] for name in ("warm_up", "counted", "cool_down"))
            run = {**merged(tables["run"], changes), "steps": max(counted, steps["long"]) if row == AUTO else counted}
            events = runs.journal(f"{row}-{number}", run)
            rates[row].append(throughput(_until(events, counted), steps["warm_up"], steps["cool_down"]))
            if row == AUTO:
                moves.append(moves_of(events, _classes(good), steps["warm_up"]))
    return compared(rates, list(good), list(bad), moves) | {"change": _change(runs, tables, good, bad)}


def compared(
    rates: Mapping[str, Sequence[float]], good: Iterable[str], bad: Iterable[str], moves: Sequence[Moves]
) -> dict[str, Any]:
    """Medians of all rounds, and the worst of the moves."""
    medians = {row: statistics.median(found) for row, found in rates.items()}
    assigned = [each.assigned_by_step for each in moves]
    return {
        "over_best_fixed": medians[AUTO] / max(medians[row] for row in good),
        "over_wrong": medians[AUTO] / max(medians[row] for row in bad),
        "assigned_by_step": None if None in assigned else max(step for step in assigned if step is not None),
        "moves_after_20_steps": max(each.later for each in moves),
        "medians": medians,
        "rates": {row: list(found) for row, found in rates.items()},
    }


def moves_of(events: Events, right: Sequence[Classes], warm_up: int) -> Moves:
    """The assignments of a run, by the steps during which they were made."""
    step, later, assigned_by, last = 0, 0, None, dict[str, str]()
    for event in events:
        if isinstance(event, j.StepTrained):
            step += 1
        elif isinstance(event, j.AffinityChanged):
            last = event.assigned
            later += len(event.why) * (step >= warm_up)
            if assigned_by is None and last in right:
                assigned_by = step
    return Moves(assigned_by, later, last)


def _change(runs: Runs, tables: Tables, good: Tables, bad: Tables) -> dict[str, Any]:
    """The pools change places: what was wrong is right then."""
    change = tables["change"]
    one, other = tables["run"]["pools"]
    speeds = {pool: tables["run"]["pools"][pool]["inject"] for pool in (one, other)}
    swapped = {
        one: [speeds[one], {**speeds[other], "from_s": change["after_s"]}],
        other: [speeds[other], {**speeds[one], "from_s": change["after_s"]}],
    }
    pools = {pool: {"inject": inject} for pool, inject in swapped.items()}
    events = runs.journal("change", {**merged(tables["run"], {"pools": pools}), "steps": change["steps"]})
    joined = max(event.at for event in events if isinstance(event, j.WorkerJoined) and "engine" in event.worker)
    trained = [event.at for event in events if isinstance(event, j.StepTrained)]
    changed_at = joined + change["after_s"]
    right = _classes(bad)
    found = [event.at for event in events if isinstance(event, j.AffinityChanged) and event.assigned in right]
    after = [at for at in found if at > changed_at]
    return {
        "before": moves_of([event for event in events if event.at < changed_at], _classes(good), 0).last,
        "after": moves_of(events, right, 0).last,
        "noticed": moves_of(events, right, 0).last in right,
        "after_steps": sum(changed_at < at < after[0] for at in trained) if after else None,
        "steps_after_change": sum(at > changed_at for at in trained),
    }


def _rows(kind: str, tables: Tables) -> dict[str, Tables]:
    return {f"{kind}_{name}": changes for name, changes in tables[kind].items()}


def _classes(rows: Tables) -> list[Classes]:
    return [{task: table["hardware"] for task, table in row["tasks"].items()} for row in rows.values()]


def _until(events: Events, steps: int) -> list[j.JournalEvent]:
    """The events of the first steps."""
    ends = [index for index, event in enumerate(events) if isinstance(event, j.StepTrained)]
    return list(events[: ends[steps - 1] + 1])


def measure_paper(tables: Tables) -> dict[str, Any]:
    """The paper's scenario in virtual time; means over the seeds."""
    rows: dict[str, list[Report]] = {row: [] for row in tables["rows"]}
    for seed in tables["seeds"]:
        for row, assignments in tables["rows"].items():
            say(f"{row}, seed {seed} ...")
            done = simulate(load_scenario("paper", [*tables["set"], *assignments, f"seed={seed}"]))
            if done.error is not None:
                raise done.error
            rows[row].append(make_report(done.events))
    rates = {row: statistics.fmean(each.trajectories_per_s for each in found) for row, found in rows.items()}
    return {
        "over_declared": rates[AUTO] / rates["declared"],
        "over_H800_only": rates[AUTO] / rates["H800_only"],
        "over_H20_only": rates[AUTO] / rates["H20_only"],
        "moves": max(each.moves for each in rows[AUTO]),
        "trajectories_per_s": rates,
        "why": rows[AUTO][0].affinity,
    }
