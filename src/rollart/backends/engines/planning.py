"""From sessions with new tokens to the indices of one forward pass."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rollart.backends.engines.checkpoint_config import ModelShape
from rollart.backends.engines.decoder import Chunk, Run, StepPlan
from rollart.backends.engines.kv import Block


class Work(NamedTuple):
    """New tokens of one session, from position `start` on; with `wants_logits` those of the last are asked for."""

    block: Block
    start: int
    tokens: NDArray[np.int32]
    wants_logits: bool


class Planner:
    """Lays work out: single tokens first, in the order of their blocks, so that neighbours become one run."""

    def __init__(self, shape: ModelShape, device: torch.device) -> None:
        self._device = device
        self._dimensions = np.arange(shape.kv_heads * shape.head_dim, dtype=np.int64)
        self._heads = np.arange(shape.kv_heads, dtype=np.int64)
        self._shape = shape

    def plan(self, work: Sequence[Work]) -> tuple[StepPlan, list[int]]:
        """The plan, and for each of its output rows the index of the work that it belongs to."""
        order = sorted(range(len(work)), key=lambda index: (len(work[index].tokens) > 1, work[index].block.offset))
        ordered = [work[index] for index in order]
        counts = np.array([len(item.tokens) for item in ordered], dtype=np.int64)
        starts = np.array([item.start for item in ordered], dtype=np.int64)
        offsets = np.array([item.block.offset for item in ordered], dtype=np.int64)
        capacities = np.array([item.block.capacity for item in ordered], dtype=np.int64)
        rows = np.cumsum(counts) - counts
        positions = np.arange(counts.sum()) + np.repeat(starts - rows, counts)
        offset, capacity = np.repeat(offsets, counts), np.repeat(capacities, counts)
        width = len(self._dimensions)
        key_slots = (offset * width + positions)[:, None] + self._dimensions * capacity[:, None]
        value_slots = (offset * self._shape.kv_heads + positions)[:, None] + self._heads * capacity[:, None]
        wanted = [index for index, item in enumerate(ordered) if item.wants_logits]
        outputs = None
        if len(wanted) < len(positions):
            outputs = self._tensor((rows + counts - 1)[wanted])
        plan = StepPlan(
            tokens=self._tensor(np.concatenate([item.tokens for item in ordered])),
            positions=self._tensor(positions),
            places=self._tensor(offset + positions),
            key_slots=self._tensor(key_slots.reshape(-1)),
            value_slots=self._tensor(value_slots.reshape(-1)),
            runs=_runs(ordered),
            chunks=[
                Chunk(int(row), len(item.tokens), item.block.offset, item.block.capacity, item.start)
                for row, item in zip(rows, ordered, strict=True)
                if len(item.tokens) > 1
            ],
            outputs=outputs,
        )
        return plan, [order[index] for index in wanted]

    def _tensor(self, array: NDArray[np.signedinteger]) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int64, copy=False)).to(self._device)


def _runs(ordered: Sequence[Work]) -> list[Run]:
    runs: list[Run] = []
    for row, item in enumerate(ordered):
        if len(item.tokens) > 1:
            break
        offset, capacity = item.block.offset, item.block.capacity
        length = item.start + 1
        if runs:
            before = runs[-1]
            if before.capacity == capacity and before.offset + before.size * capacity == offset:
                runs[-1] = before._replace(size=before.size + 1, length=max(before.length, length))
                continue
        runs.append(Run(row, 1, offset, capacity, length))
    return runs
