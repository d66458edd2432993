"""Live view of a run on a terminal: one panel, redrawn a few times per second.

Like the lines of `progress`, which are for files and pipes, it is driven by the journal alone. Failures and evaluations
remain above the panel as lines, so that they are not missed.
"""

from collections import Counter, deque

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rollart.app.progress import mishap
from rollart.app.tables import PlainTable
from rollart.observe.steps import EvalRecord, StepFold, StepRecord
from rollart.ports.sink import EventSink
from rollart.types import journal as j
from rollart.types.ids import TrajectoryId
from rollart.types.trajectory import FAILURES, Outcome

REFRESH_PER_S = 4
SPARKS = "▁▂▃▄▅▆▇█"
SPARK_STEPS = 30
PACE_STEPS = 8
"""Number of recent steps from which the remaining time is estimated."""


class LiveView:
    """EventSink that forwards all events and shows the state of the run."""

    def __init__(self, sink: EventSink, console: Console, name: str, steps: int) -> None:
        self._sink = sink
        self._console = console
        self._name = name
        self._steps = steps
        self._fold = StepFold()
        self._last: StepRecord | None = None
        self._rewards: dict[str, deque[float]] = {}
        """Mean rewards of trajectories finished between two batches, by task."""
        self._kept: dict[str, float] = {}
        """Mean rewards of the last batch, by task."""
        self._held_out: dict[str, list[float]] = {}
        self._ended: Counter[Outcome] = Counter()
        self._running: set[TrajectoryId] = set()
        """A resumed run also reports the end of trajectories that started before this view."""
        self._times: deque[float] = deque(maxlen=PACE_STEPS + 1)
        self._live = Live(console=console, refresh_per_second=REFRESH_PER_S, get_renderable=self.render)
        self._live.start()

    def append(self, event: j.JournalEvent) -> None:
        self._sink.append(event)
        for record in self._fold.take(event):
            self._take(record)
        match event:
            case j.TrajectoryStarted():
                self._running.add(event.trajectory)
            case j.TrajectoryEnded():
                self._running.discard(event.trajectory)
                self._ended[event.outcome] += 1
            case _:
                pass
        line = mishap(event)
        if line:
            self._console.print(line, highlight=False, markup=False)

    async def flush(self) -> None:
        await self._sink.flush()

    async def close(self) -> None:
        for record in self._fold.finish():
            self._take(record)
        self._live.stop()
        await self._sink.close()

    def render(self) -> RenderableType:
        last = self._last
        step = 0 if last is None else last.step
        head = PlainTable.grid(padding=(0, 2))
        head.add_row(
            Text(self._name, style="bold"),
            ProgressBar(total=self._steps, completed=step, width=30),
            f"step {step}/{self._steps}",
            self._time_left(),
        )
        if last is None:
            return Group(head, f"{len(self._running)} agents running, no step yet")
        return Group(head, self._tasks(), self._figures(last))

    def _take(self, record: StepRecord | EvalRecord) -> None:
        if isinstance(record, EvalRecord):
            if record.mean_reward is not None:
                self._held_out.setdefault(record.task, []).append(record.mean_reward)
                self._console.print(
                    f"held-out {record.task}: {record.mean_reward:.3f} at step {record.step}",
                    highlight=False,
                    markup=False,
                )
            return
        self._last = record
        self._times.append(record.at)
        for task, reward in record.rewards.items():
            self._rewards.setdefault(task, deque(maxlen=SPARK_STEPS)).append(reward)
        self._kept |= record.kept_rewards

    def _tasks(self) -> Table:
        table = PlainTable(box=box.SIMPLE_HEAD, pad_edge=False)
        for column in ("task", "reward", "", "kept", "held-out, first → last"):
            table.add_column(column)
        for task in sorted({*self._rewards, *self._kept}):
            scores, rewards = self._held_out.get(task, []), list(self._rewards.get(task, ()))
            held_out = f"{scores[0]:.3f} → {scores[-1]:.3f}" if scores else "none yet"
            kept = f"{self._kept[task]:.3f}" if task in self._kept else ""
            table.add_row(task, f"{rewards[-1]:.3f}" if rewards else "", sparks(rewards), kept, held_out)
        return table

    def _figures(self, last: StepRecord) -> Table:
        grid = PlainTable.grid(padding=(0, 2))
        busy = ", ".join(f"{pool} {share:.0%}" for pool, share in last.busy.items())
        failed = sorted((outcome.value, count) for outcome, count in self._ended.items() if outcome in FAILURES)
        grid.add_row("tokens/s", f"{last.tokens_per_s:,.0f}")
        grid.add_row("busy", busy or "unknown")
        grid.add_row(
            "staleness", f"≤ {max(last.staleness, default=0)}, syncs suspended {last.suspended_s * 1e3:.0f} ms"
        )
        grid.add_row("agents", f"{len(self._running)} running, {sum(self._ended.values()):,} done")
        grid.add_row("failures", ", ".join(f"{name} {count}" for name, count in failed) or "none")
        return grid

    def _time_left(self) -> str:
        if self._last is None or len(self._times) < 2:
            return ""
        per_step_s = (self._times[-1] - self._times[0]) / (len(self._times) - 1)
        seconds = round(per_step_s * (self._steps - self._last.step))
        return f"{seconds // 60}:{seconds % 60:02d} left"


def sparks(values: list[float]) -> str:
    """Sparkline of the values.

    >>> sparks([0.0, 0.5, 1.0])
    '▁▅█'
    >>> sparks([2.0, 2.0])
    '▁▁'
    """
    low, high = min(values, default=0.0), max(values, default=0.0)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((value - low) * scale)] for value in values)
