"""Progress of a run on stderr: one line per step, evaluation and failure."""

from collections.abc import Callable

from rollart.observe.steps import FinishedRewards
from rollart.ports.sink import EventSink
from rollart.types import journal as j


class ProgressLogger:
    """EventSink that forwards all events and logs those of interest to users."""

    def __init__(self, sink: EventSink, say: Callable[[str], None], steps: int) -> None:
        self._sink = sink
        self._say = say
        self._steps = steps
        self._started_at = 0.0
        self._claimed: dict[int, j.BatchClaimed] = {}
        self._finished = FinishedRewards()

    def append(self, event: j.JournalEvent) -> None:
        self._sink.append(event)
        self._finished.take(event)
        line = self._line(event)
        if line:
            self._say(line)

    async def flush(self) -> None:
        await self._sink.flush()

    async def close(self) -> None:
        await self._sink.close()

    def _line(self, event: j.JournalEvent) -> str:
        match event:
            case j.RunStarted() | j.RunResumed():
                self._started_at = event.at
            case j.BatchClaimed():
                self._claimed[event.claim] = event
            case j.StepTrained():
                return self._step(event)
            case j.EvalEnded():
                mean = "no score" if event.mean_reward is None else f"{event.mean_reward:.3f}"
                passed = "".join(f", pass@{k} {value:.3f}" for k, value in event.pass_at.items())
                return f"held-out {event.task}: {mean} over {event.scored} of {event.episodes} episodes{passed}"
            case _:
                return mishap(event)
        return ""

    def _step(self, event: j.StepTrained) -> str:
        parts = [f"step {event.version.step}/{self._steps} at {event.at - self._started_at:.1f} s: {event.version}"]
        claim = self._claimed.pop(event.claim, None)
        finished, kept = self._finished.pop(event.claim), {} if claim is None else claim.rewards
        parts += [f"{task} {told_rewards(finished.get(task), kept.get(task))}" for task in sorted({*finished, *kept})]
        if claim is not None:
            parts.append(f"staleness ≤ {max(claim.staleness, default=0)}")
        parts += [f"{name} {event.metrics[name]:.3g}" for name in _SHOWN if name in event.metrics]
        return ", ".join(parts)


def told_rewards(finished: float | None, kept: float | None) -> str:
    """Mean reward of all trajectories finished for a step, and of the batch, which filters may have selected from it.

    >>> told_rewards(0.91, 0.54)
    'reward 0.910 (kept 0.540)'
    """
    if finished is None:
        return f"reward of the batch {kept:.3f}"
    return f"reward {finished:.3f}" + ("" if kept is None else f" (kept {kept:.3f})")


def mishap(event: j.JournalEvent) -> str:
    """One-line description of a failure; empty for other events."""
    match event:
        case j.WorkerDied():
            return f"{event.worker} died: {event.reason} ({event.action})"
        case j.WorkerWaits():
            return f"{event.worker} waits for a node: {event.why}"
        case j.WorkerPlaced(why=why) if why:
            return f"{event.worker} runs on {event.node}: {why}"
        case j.WorkerLeaves():
            return f"{event.worker} leaves: {event.why}"
        case j.WorkerLeft(unfinished=True):
            return f"{event.worker} was stopped before it had finished its work: it ran out of time"
        case j.Quarantined():
            rest_s = event.until - event.at  # negative: given up, as the reason explains
            return f"{event.part} is set aside{f' for {rest_s:.3g} s' if rest_s > 0 else ''}: {event.reason}"
        case j.CheckpointFailed():
            return f"the checkpoint of {event.version} was not saved: {event.reason}"
        case j.StallReported():
            return "no progress for a while; waiting for:\n  " + "\n  ".join(event.waits)
        case _:
            return ""


_SHOWN = ("loss", "grad_norm", "mismatch", "tokens")
