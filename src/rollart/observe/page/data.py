"""All data of the page, as plain structs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from rollart.observe.bias import warnings
from rollart.observe.journal import fold_journal
from rollart.observe.metrics import LINES
from rollart.observe.page.samples import Sample, read_samples
from rollart.observe.page.slots import Failure, Slot
from rollart.observe.page.timeline import Timeline, TimelineFold
from rollart.observe.report import Report
from rollart.observe.steps import EvalRecord, FunctionRecord, Record, StepFold, StepRecord, function_record
from rollart.types.journal import JournalEvent, TimeUse

MOST_STEPS = 1000
"""Maximum number of points of a curve; longer runs are subsampled evenly."""
MOST_VIOLATIONS = 50

Baselines = Mapping[str, Mapping[str, float]]
"""Scores of scripted baselines on the held-out prompts of each task, worst first."""


class Audit(msgspec.Struct, kw_only=True):
    events: int
    pruned: int
    violations: int
    listed: list[str]


class PageData(msgspec.Struct, kw_only=True):
    """The only input of the page's script."""

    name: str
    folder: str
    report: Report
    complete: bool
    """False if the journal has gaps, so that the totals of the report are not available."""
    wasted_token_share: float
    bias_warnings: list[str]
    audit: Audit
    steps: list[StepRecord]
    evaluations: list[EvalRecord]
    baselines: dict[str, dict[str, float]]
    timeline: Timeline
    failures: list[Failure]
    failed: int
    slots: list[Slot]
    slot_count: int
    functions: dict[str, FunctionRecord]
    """Use of reward functions."""
    step_s: float | None
    """Mean duration of an environment reset or step."""
    samples: list[Sample]
    config: dict[str, Any] | None


def gather(
    journal: Path, trajectories: Path, baselines: Baselines | None = None, config: dict[str, Any] | None = None
) -> PageData:
    """Read a run folder: its journal once, then its metrics and sampled trajectories."""
    folder = journal.parent
    timeline, steps = TimelineFold(), _Steps()

    def take(event: JournalEvent) -> None:
        timeline.take(event)
        steps.take(event)

    pruned, folds = fold_journal(journal, take)
    violations, report = folds.finish()
    complete = report is not None
    report = report or Report()
    when = timeline.finish()
    records = _whole(folder / LINES, steps)
    if report.stop is None:
        report.seconds, report.steps = when.seconds, records.steps[-1].step if records.steps else 0
    slots = timeline.slots
    answers = sum(slot.resets + slot.rounds for slot in slots.slots.values())
    busy_s = report.pools.get("environments", {}).get(TimeUse.BUSY)
    return PageData(
        name=report.name or folder.absolute().name,
        folder=folder.absolute().name,
        report=report,
        complete=complete,
        wasted_token_share=report.wasted_token_share,
        bias_warnings=warnings(report.bias),
        audit=Audit(
            events=folds.auditor.count,
            pruned=pruned,
            violations=len(violations) + folds.auditor.unlisted,
            listed=[str(violation) for violation in violations[:MOST_VIOLATIONS]],
        ),
        steps=records.steps[:: -(-len(records.steps) // MOST_STEPS) or 1],
        evaluations=records.evaluations,
        baselines={task: dict(scores) for task, scores in (baselines or {}).items()},
        timeline=when,
        failures=slots.failures,
        failed=slots.failed,
        slots=slots.slowest(),
        slot_count=len(slots.slots),
        functions={name: function_record(use) for name, use in report.functions.items()},
        step_s=busy_s / answers if busy_s is not None and answers and not pruned else None,
        samples=read_samples(trajectories),
        config=config,
    )


class _Records(msgspec.Struct):
    steps: list[StepRecord]
    evaluations: list[EvalRecord]


class _Steps:
    """Collects the step and evaluation records of a journal."""

    def __init__(self) -> None:
        self._fold = StepFold()
        self.records: list[Record] = []

    def take(self, event: JournalEvent) -> None:
        self.records += self._fold.take(event)

    def finish(self) -> list[Record]:
        return self.records + self._fold.finish()


def _whole(lines: Path, steps: _Steps) -> _Records:
    """Steps and evaluations in order, from the journal and, where it is pruned, from the metrics file.

    If a step was rolled back and trained again, its last record counts.
    """
    trained: dict[int, StepRecord] = {}
    evaluated: dict[tuple[int, str], EvalRecord] = {}
    for record in [*_read_metrics(lines), *steps.finish()]:
        if isinstance(record, StepRecord):
            trained[record.step] = record
        else:
            evaluated[record.step, record.task] = record
    return _Records([trained[step] for step in sorted(trained)], [evaluated[key] for key in sorted(evaluated)])


def _read_metrics(path: Path) -> list[Record]:
    decoder = msgspec.json.Decoder(Record)
    records = []
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        try:
            records.append(decoder.decode(line))
        except msgspec.MsgspecError:
            continue  # the writer was killed in the middle of this line
    return records
