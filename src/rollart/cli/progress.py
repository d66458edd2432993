"""What a run says on stderr while it goes on: one line per step, evaluation and mishap."""

from collections.abc import Callable

from rollart.ports.sink import EventSink
from rollart.types import journal as j


class Narrator:
    """An EventSink that passes everything on and tells of what a person wants to know."""

    def __init__(self, sink: EventSink, say: Callable[[str], None], steps: int) -> None:
        self._sink = sink
        self._say = say
        self._steps = steps
        self._started_at = 0.0
        self._claimed: dict[int, j.BatchClaimed] = {}

    def append(self, event: j.JournalEvent) -> None:
        self._sink.append(event)
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
                return f"held-out {event.task}: {mean} over {event.scored} of {event.episodes} episodes"
            case _:
                return mishap(event)
        return ""

    def _step(self, event: j.StepTrained) -> str:
        parts = [f"step {event.version.step}/{self._steps} at {event.at - self._started_at:.1f} s: {event.version}"]
        claim = self._claimed.pop(event.claim, None)
        if claim is not None:
            parts += [f"{task} reward {reward:.3f}" for task, reward in claim.rewards.items()]
            parts.append(f"staleness ≤ {max(claim.staleness, default=0)}")
        parts += [f"{name} {event.metrics[name]:.3g}" for name in _SHOWN if name in event.metrics]
        return ", ".join(parts)


def mishap(event: j.JournalEvent) -> str:
    """What went wrong, in a line; empty if nothing did."""
    match event:
        case j.WorkerDied():
            return f"{event.worker} died: {event.reason} ({event.action})"
        case j.Quarantined():
            return f"{event.part} is set aside: {event.reason}"
        case j.CheckpointFailed():
            return f"the checkpoint of {event.version} was not saved: {event.reason}"
        case j.StallReported():
            return "nothing has moved for a while; waiting for:\n  " + "\n  ".join(event.waits)
        case _:
            return ""


_SHOWN = ("loss", "grad_norm", "mismatch", "tokens")
