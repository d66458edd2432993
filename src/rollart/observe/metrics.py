"""Metrics of a run on disk: a JSON line per step and evaluation, and TensorBoard files if tensorboardX is installed.

Invariants: lines are complete and in order, each written when its step is trained; a resumed run appends to them, after
removing a truncated one. In TensorBoard, steps that are trained again hide the earlier ones. Write errors are raised by
the next `flush`, like those of the journal.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from rollart.observe.files import append_whole
from rollart.observe.steps import EvalRecord, Record, StepFold
from rollart.ports.sink import EventSink
from rollart.types.errors import RunError
from rollart.types.journal import EpochStarted, JournalEvent

if TYPE_CHECKING:
    from rollart.observe.board import Board

LINES = "metrics.jsonl"
TENSORBOARD = "tensorboard"


class MetricsSink:
    """EventSink that forwards all events and writes metrics."""

    def __init__(self, sink: EventSink, folder: Path) -> None:
        self._sink = sink
        self._fold = StepFold()
        self._path = folder / LINES
        _mend(self._path)
        self._board = _board(folder / TENSORBOARD)
        self._lost: OSError | None = None

    def append(self, event: JournalEvent) -> None:
        self._sink.append(event)
        self._write(self._fold.take(event))
        if isinstance(event, EpochStarted) and self._board is not None:
            try:
                self._board.restart(event.step + 1)
            except OSError as error:
                self._lost = error

    async def flush(self) -> None:
        self._check()
        await self._sink.flush()

    async def close(self) -> None:
        self._write(self._fold.finish())
        await self._sink.close()
        self._check()

    def _check(self) -> None:
        if self._lost is not None:
            raise RunError(f"{self._path} cannot be written: {self._lost}. Free space and resume.")

    def _write(self, records: Iterable[Record]) -> None:
        for record in records:
            try:
                append_whole(self._path, msgspec.json.encode(record) + b"\n")
                if self._board is not None:
                    self._board.add(scalars(record), record.step)
            except OSError as error:
                self._lost = error


def scalars(record: Record) -> dict[str, float]:
    """A record as numbers with hierarchical names."""
    if isinstance(record, EvalRecord):
        mean = {} if record.mean_reward is None else {f"held_out/{record.task}": record.mean_reward}
        return mean | {f"held_out/{record.task}/pass@{k}": value for k, value in record.pass_at.items()}
    numbers = {f"reward/{task}": value for task, value in record.rewards.items()}
    numbers |= {f"kept_reward/{task}": value for task, value in record.kept_rewards.items()}
    numbers |= {f"reward_parts/{name}": value for name, value in record.reward_parts.items()}
    numbers |= {f"rewards_defaulted/{name}": float(count) for name, count in record.defaulted.items()}
    numbers |= {f"train/{name}": value for name, value in record.metrics.items()}
    numbers |= {f"busy/{pool}": value for pool, value in record.busy.items()}
    numbers |= {f"outcomes/{outcome}": float(count) for outcome, count in record.outcomes.items()}
    for name, function in record.functions.items():
        numbers |= {f"functions/{name}/{key}": float(value) for key, value in msgspec.structs.asdict(function).items()}
    numbers["rollout/tokens_per_s"] = record.tokens_per_s
    numbers["rollout/suspended_s"] = record.suspended_s
    if record.staleness:
        numbers["rollout/staleness_mean"] = sum(record.staleness) / len(record.staleness)
        numbers["rollout/staleness_max"] = float(max(record.staleness))
    return numbers


def _mend(path: Path) -> None:
    """Remove a last line that was truncated when its writer was killed: the next line would be appended to it."""
    if path.is_file():
        lines = path.read_bytes()
        os.truncate(path, lines.rfind(b"\n") + 1)


def _board(folder: Path) -> "Board | None":
    """None if the package is missing: the JSON lines are written in any case."""
    try:
        from rollart.observe.board import Board
    except ModuleNotFoundError:
        return None
    return Board(folder)
