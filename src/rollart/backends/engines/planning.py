"""Plan one forward pass for sessions with new tokens."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rollart.backends.engines.decoder import StepPlan
from rollart.backends.engines.kv import Block


class Work(NamedTuple):
    """New tokens of one session, starting at `start`; with `wants_logits` the logits of the last one are requested."""

    block: Block
    start: int
    tokens: NDArray[np.int32]
    wants_logits: bool


def plan_step(work: Sequence[Work], device: torch.device) -> tuple[StepPlan, list[int]]:
    """Return the plan and, for each output row, the index of its work item.

    Single tokens come first, in block order, so that neighbours are adjacent.
    """
    order = sorted(range(len(work)), key=lambda index: (len(work[index].tokens) > 1, work[index].block.offset))
    pieces = []
    ends = []
    wanted = []
    row = 0
    for index in order:
        block, start, tokens, wants_logits = work[index]
        pieces.append((row, len(tokens), block.offset, block.capacity, start))
        row += len(tokens)
        if wants_logits:
            wanted.append(index)
            ends.append(row - 1)
    tokens = np.concatenate([work[index].tokens for index in order]).astype(np.int64)
    plan = StepPlan(
        tokens=torch.from_numpy(tokens).to(device),
        pieces=np.array(pieces, dtype=np.int64),
        outputs=torch.tensor(ends, dtype=torch.int64, device=device) if len(ends) < row else None,
    )
    return plan, wanted
