"""The live view of a run on a terminal: one panel that is drawn anew a few times per second.

Like the lines of `progress`, which are for files and pipes, it knows nothing but the journal. Mishaps and evaluations
stay above the panel as lines, so that nothing is missed by who looks away.
"""

from collections import Counter, deque

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from rollart.cli.progress import mishap
from rollart.observe.steps import EvalRecord, StepFold, StepRecord
from rollart.ports.sink import EventSink
from rollart.types import journal as j

REFRESH_PER_S = 4
SPARKS = "▁▂▃▄▅▆▇█"
SPARK_STEPS = 30
PACE_STEPS = 8
"""Time left is reckoned by so many of the last steps."""


class LiveView:
    """An EventSink that passes everything on and shows where the run stands."""

    def __init__(self, sink: EventSink, console: Console, name: str, steps: int) -> None:
        self._sink = sink
        self._console = console
        self._name = name
        self._steps = steps
        self._fold = StepFold()
        self._last: StepRecord | None = None
        self._rewards: dict[str, deque[float]] = {}
        self._held_out: dict[str, list[float]] = {}
        self._ended: Counter[str] = Counter()
        self._running = 0
        self._times: deque[float] = deque(maxlen=PACE_STEPS + 1)
        self._live = Live(console=console, refresh_per_second=REFRESH_PER_S, get_renderable=self.render)
        self._live.start()

    def append(self, event: j.JournalEvent) -> None:
        self._sink.append(event)
        for record in self._fold.take(event):
            self._take(record)
        match event:
            case j.TrajectoryStarted():
                self._running += 1
            case j.TrajectoryEnded():
                self._running -= 1
                self._ended[event.outcome.value] += 1
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
        head = Table.grid(padding=(0, 2))
        head.add_row(
            f"[bold]{self._name}[/]",
            ProgressBar(total=self._steps, completed=step, width=30),
            f"step {step}/{self._steps}",
            self._time_left(),
        )
        if last is None:
            return Group(head, f"{self._running} agents at work, no step yet")
        return Group(head, self._tasks(), self._figures(last))

    def _take(self, record: StepRecord | EvalRecord) -> None:
        if isinstance(record, EvalRecord):
            if record.mean_reward is not None:
                self._held_out.setdefault(record.task, []).append(record.mean_reward)
                self._console.print(
                    f"held-out {record.task}: {record.mean_reward:.3f} at step {record.step}", highlight=False
                )
            return
        self._last = record
        self._times.append(record.at)
        for task, reward in record.rewards.items():
            self._rewards.setdefault(task, deque(maxlen=SPARK_STEPS)).append(reward)

    def _tasks(self) -> Table:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for column in ("task", "reward", "", "held-out, first → last"):
            table.add_column(column)
        for task, rewards in self._rewards.items():
            scores = self._held_out.get(task, [])
            held_out = f"{scores[0]:.3f} → {scores[-1]:.3f}" if scores else "none yet"
            table.add_row(task, f"{rewards[-1]:.3f}", sparks(list(rewards)), held_out)
        return table

    def _figures(self, last: StepRecord) -> Table:
        grid = Table.grid(padding=(0, 2))
        busy = ", ".join(f"{pool} {share:.0%}" for pool, share in last.busy.items())
        failed = {name: count for name, count in sorted(self._ended.items()) if name.endswith("failed")}
        grid.add_row("tokens/s", f"{last.tokens_per_s:,.0f}")
        grid.add_row("busy", busy or "unknown")
        grid.add_row(
            "staleness", f"≤ {max(last.staleness, default=0)}, syncs suspended {last.suspended_s * 1e3:.0f} ms"
        )
        grid.add_row("agents", f"{self._running} at work, {sum(self._ended.values()):,} done")
        grid.add_row("failures", ", ".join(f"{name} {count}" for name, count in failed.items()) or "none")
        return grid

    def _time_left(self) -> str:
        if self._last is None or len(self._times) < 2:
            return ""
        per_step_s = (self._times[-1] - self._times[0]) / (len(self._times) - 1)
        seconds = round(per_step_s * (self._steps - self._last.step))
        return f"{seconds // 60}:{seconds % 60:02d} left"


def sparks(values: list[float]) -> str:
    """A small picture of how values went.

    >>> sparks([0.0, 0.5, 1.0])
    '▁▅█'
    >>> sparks([2.0, 2.0])
    '▁▁'
    """
    low, high = min(values), max(values)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((value - low) * scale)] for value in values)
