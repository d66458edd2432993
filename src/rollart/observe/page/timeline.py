"""Activity of every worker over the run, as rows of a timeline.

Engines, environments and rewards have strips (`strips`); the trainer, weight sync and evaluations have spans; single
moments have marks. Everything comes from the journal:

    engine        sampled tokens, at the end of their turn
    environments  open episodes, from start to reward
    reward        rewards that arrived
    trainer       training, then publication, then the checkpoint
    weight sync   waiting for publication and staging, then engines suspended
    held-out      from the first episode of an evaluation to its end
"""

import msgspec

from rollart.observe.page.slots import Failure, SlotFold
from rollart.observe.page.strips import Strips
from rollart.types import journal as j
from rollart.types.ids import TrajectoryId
from rollart.types.messages import Role
from rollart.types.trajectory import Outcome, Purpose
from rollart.types.versions import Version

MOST_ROWS = 24
"""Maximum number of workers of a kind with their own row; the others share one."""
MOST_SPANS = 600
MOST_MARKS = 200
TRAINER, SYNC, HELD_OUT, REWARD, RUN = "trainer", "weight sync", "held-out episodes", "reward", "run"


class Span(msgspec.Struct, frozen=True, array_like=True):
    start: float
    end: float
    kind: str
    note: str = ""


class Mark(msgspec.Struct, frozen=True, array_like=True):
    at: float
    kind: str
    note: str


class Row(msgspec.Struct, kw_only=True):
    """One row; `values` are rates per second, one per bin."""

    name: str
    unit: str = ""
    peak: float = 0.0
    values: list[float] = []
    spans: list[Span] = []
    marks: list[Mark] = []


class Timeline(msgspec.Struct, kw_only=True):
    seconds: float
    bin_s: float
    rows: list[Row]
    resumed: list[float]
    """Times at which a new controller resumed the run."""


class TimelineFold:
    """Consumes a journal event by event, and passes each on to `slots`."""

    def __init__(self) -> None:
        self.slots = SlotFold()
        self.at = 0.0
        self._began_at: float | None = None
        self._strips = Strips()
        self._places: dict[str, None] = {}
        """Rows of workers, in the order of their start."""
        self._spans: dict[str, list[Span]] = {}
        self._marks: dict[str, list[Mark]] = {}
        self._resumed: list[float] = []
        self._open: dict[TrajectoryId, tuple[float, str]] = {}
        """Start time and row of every open episode."""
        self._spawned: dict[str, float] = {}
        self._trained: dict[Version, float] = {}
        self._published_at = 0.0
        self._rounds: dict[str, float] = {}

    def take(self, event: j.JournalEvent) -> None:
        if self._began_at is None:
            self._began_at = event.at
        elif isinstance(event, j.RunResumed):
            # The new controller has its own clock: continue where the previous one ended.
            self._began_at = event.at - self.at
        self.at = at = max(event.at - self._began_at, 0.0)
        failure = self.slots.take(event, at)
        match event:
            case j.TurnEnded() | j.TurnAborted():
                self._strips.add(_place(event.engine), at, event.sampled)
            case j.TrajectoryStarted():
                self._open[event.trajectory] = (at, _place(event.environment.partition("#")[0]))
            case j.RewardArrived():
                self._strips.add(REWARD, at, 1.0)
            case j.TrajectoryEnded():
                self._ended(event, failure)
            case j.GroupOpened() if event.purpose is Purpose.EVAL:
                self._rounds.setdefault(event.task, at)
            case j.EvalEnded():
                self._span(HELD_OUT, self._rounds.pop(event.task, at), "held-out", f"{event.task}, step {event.step}")
            case _:
                self._take_rare(event)

    def _take_rare(self, event: j.JournalEvent) -> None:
        at = self.at
        match event:
            case j.StepTrained():
                self._trained[event.version] = at
                self._span(TRAINER, at - event.seconds, "training", f"step {event.version.step}")
            case j.VersionPublished():
                self._published_at = at
                self._span(TRAINER, self._trained.pop(event.version, at), "publication", str(event.version))
            case j.CheckpointSaved():
                self._span(TRAINER, self._published_at, "checkpoint", str(event.version))
            case j.WeightsSynced():
                suspended_at = at - event.suspended_s
                self._add(SYNC, Span(suspended_at - event.exposed_s, suspended_at, "waiting", str(event.version)))
                self._span(SYNC, suspended_at, "suspended", str(event.version))
            case j.WorkerSpawned():
                self._places[_place(event.worker)] = None
                self._spawned[event.worker] = at
            case j.WorkerJoined():
                self._span(_row(event.worker), self._spawned.pop(event.worker, at), "starting", event.worker)
            case j.WorkerDied():
                self._mark(_row(event.worker), "lost", f"{event.worker} was lost: {event.reason} ({event.action})")
            case j.WorkerLeft():
                self._mark(_row(event.worker), "left", f"{event.worker} left its node")
            case j.EngineOutOfService():
                self._mark(_row(event.worker), "lost", f"{event.worker} is out of service: {event.reason}")
            case j.Quarantined():
                self._mark(_row(event.part.partition("#")[0]), "set aside", f"{event.part}: {event.reason}")
            case j.CheckpointFailed():
                self._mark(TRAINER, "failed", f"the checkpoint of {event.version} was not saved: {event.reason}")
            case j.RolledBack():
                self._mark(TRAINER, "rolled back", f"back to step {event.step}")
            case j.StallReported():
                self._mark(RUN, "stall", "nothing moved; waiting for: " + "; ".join(event.waits[:5]))
            case j.RunResumed():
                self._resumed.append(at)
            case _:
                pass

    def finish(self) -> Timeline:
        """Build the timeline; the fold cannot be used afterwards."""
        self.slots.finish(self.at)
        for start, row in self._open.values():
            self._strips.add_span(row, start, self.at)
        rows = [*self._worker_rows(Role.ENGINE), *self._worker_rows(Role.ENVIRONMENT)]
        rows += [self._row(name) for name in (REWARD, TRAINER, SYNC, HELD_OUT, RUN) if self._has_row(name)]
        return Timeline(seconds=self.at, bin_s=self._strips.width_s, rows=rows, resumed=self._resumed[:MOST_MARKS])

    def _ended(self, event: j.TrajectoryEnded, failure: Failure | None) -> None:
        opened = self._open.pop(event.trajectory, None)
        if opened is not None:
            self._strips.add_span(opened[1], opened[0], self.at)
        if failure is not None and opened is not None and event.outcome is Outcome.ENV_FAILED:
            kind = "hung" if failure.hung else "failed"
            note = f"{failure.part}: {failure.what} {kind}, {self.at - failure.since:.1f} s. {failure.cause}"
            self._add(opened[1], Span(failure.since, self.at, kind, note))

    def _span(self, row: str, start: float, kind: str, note: str) -> None:
        """Add a span that ends now."""
        self._add(row, Span(max(start, 0.0), self.at, kind, note))

    def _add(self, row: str, span: Span) -> None:
        spans = self._spans.setdefault(row, [])
        spans.append(span)
        if len(spans) >= 4 * MOST_SPANS:
            self._spans[row] = fewer(spans, MOST_SPANS, self.at)

    def _mark(self, row: str, kind: str, note: str) -> None:
        marks = self._marks.setdefault(row, [])
        if len(marks) < MOST_MARKS:
            marks.append(Mark(self.at, kind, note))

    def _has_row(self, name: str) -> bool:
        return name in self._strips.rows or name in self._spans or name in self._marks

    def _worker_rows(self, role: Role) -> list[Row]:
        # A pruned journal may lack the start of a worker, but not its activity.
        known = dict.fromkeys([*self._places, *self._strips.rows, *self._spans])
        names = [name for name in known if name.startswith(f"{role.value}/")]
        rows = [self._row(name) for name in names[:MOST_ROWS]]
        if len(names) > MOST_ROWS:
            rows.append(self._shared_row(names[MOST_ROWS:]))
        return rows

    def _row(self, name: str) -> Row:
        width = self._strips.width_s
        values = [amount / width for amount in self._strips.rows.get(name, ())]
        return Row(
            name=name,
            unit=_UNITS[name.partition("/")[0]] if values else "",
            peak=max(values, default=0.0),
            values=[round(value, 2) for value in values],
            spans=fewer(self._spans.get(name, []), MOST_SPANS, self.at),
            marks=self._marks.get(name, []),
        )

    def _shared_row(self, names: list[str]) -> Row:
        rows = [self._row(name) for name in names]
        bins = max((len(row.values) for row in rows), default=0)
        values = [round(sum(row.values[bin] for row in rows if bin < len(row.values)), 2) for bin in range(bins)]
        spans = sorted((span for row in rows for span in row.spans), key=lambda span: span.start)
        marks = sorted((mark for row in rows for mark in row.marks), key=lambda mark: mark.at)
        return Row(
            name=f"{len(names)} more",
            unit=rows[0].unit,
            peak=max(values, default=0.0),
            values=values,
            spans=fewer(spans, MOST_SPANS, self.at),
            marks=marks[:MOST_MARKS],
        )


_UNITS = {"engine": "tokens/s", "environment": "open episodes", REWARD: "rewards/s"}


def fewer(spans: list[Span], most: int, seconds: float) -> list[Span]:
    """Merge neighbouring spans of one kind, the closest first, until at most `most` are left.

    Hangs and failures are never merged; if they alone are too many, the longest are kept.

    >>> fewer([Span(0, 1, "a"), Span(1.01, 2, "a"), Span(5, 6, "a")], 2, 10.0)
    [Span(start=0, end=2, kind='a', note=''), Span(start=5, end=6, kind='a', note='')]
    """
    gap_s = seconds / 10_000
    while len(spans) > most and gap_s <= seconds:
        merged: list[Span] = []
        last: dict[str, int] = {}
        for span in spans:
            place = last.get(span.kind)
            if place is not None and span.kind not in _KEPT and span.start - merged[place].end <= gap_s:
                before = merged[place]
                merged[place] = Span(before.start, max(before.end, span.end), span.kind, before.note)
            else:
                last[span.kind] = len(merged)
                merged.append(span)
        spans = merged
        gap_s *= 2
    return spans if len(spans) <= most else sorted(spans, key=lambda span: span.start - span.end)[:most]


_KEPT = ("hung", "failed")


def _place(worker: str) -> str:
    """Worker id without its incarnation."""
    return worker.rpartition(".")[0]


def _row(worker: str) -> str:
    """Row of a worker; trainers and rewards share one per role."""
    role = worker.partition("/")[0]
    return role if role in (Role.TRAINER.value, Role.REWARD.value) else _place(worker)
