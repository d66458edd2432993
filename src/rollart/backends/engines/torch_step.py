"""The forward pass with torch operations: on any device, in any precision.

Decoding sessions in adjacent blocks form a `Run`, whose attention is one batched product; a session with several new
tokens is a `Chunk`. Query heads that share a key-value head are rows of one small matrix, so grouped-query attention
repeats nothing.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - as in torch's own documentation
from numpy.typing import NDArray

from rollart.backends.engines.checkpoint_config import ModelShape
from rollart.backends.engines.kv import KvArena, Layers
from rollart.backends.engines.rope import rotations
from rollart.backends.engines.weights import LayerWeights

MIN_GROUP_ROWS = 4
"""Batched products with fewer rows are slower than with four, padded with zeros."""
LENGTH_GRAIN = 16
"""Attention lengths of a run are rounded up to a multiple of this."""
SMALL_MASK = 8192
"""Masks up to this many numbers, enough for an agent's next turn, are cached by size."""
SMALL_MASKS = 512
MAX_SCORES = 1 << 22
"""Maximum number of attention scores in memory; longer chunks are processed in parts."""


class Run(NamedTuple):
    """Decoding sessions in adjacent blocks; their tokens are the rows starting at `row`."""

    row: int
    offset: int
    capacity: int
    lengths: list[int]
    """Lengths of their contexts, including the new token."""


class Chunk(NamedTuple):
    """`size` new tokens of one session, starting at position `start`."""

    row: int
    size: int
    offset: int
    capacity: int
    start: int


class TorchMaths:
    def __init__(self, shape: ModelShape, *, dtype: torch.dtype, device: torch.device, max_context: int) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self.turns = rotations(shape, max_context, device)
        self.rows = max(shape.group, MIN_GROUP_ROWS)
        self.scale = shape.head_dim**-0.5
        self._floor = torch.full((1,), (shape.hidden * shape.norm_eps) ** 0.5, device=device)
        self.head_floor = torch.full((1,), (shape.head_dim * shape.norm_eps) ** 0.5, device=device)
        self._small_mask = lru_cache(SMALL_MASKS)(self._causal_mask)

    def begin(self, kv: KvArena, pieces: NDArray[np.int64]) -> "_Step":
        return _Step(self, kv, pieces)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, weight, self._floor)

    def gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def mask(self, count: int, length: int) -> torch.Tensor:
        """Causal mask for the last `count` of `length` positions: -inf after the query's own. Repeated per group."""
        small = self.shape.group * count * length <= SMALL_MASK
        return self._small_mask(count, length) if small else self._causal_mask(count, length)

    def _causal_mask(self, count: int, length: int) -> torch.Tensor:
        unseen = torch.full((count, length), float("-inf"), dtype=self.dtype, device=self.device)
        return unseen.triu_(length - count + 1).repeat(self.shape.group, 1)

    def softmax(self, scores: torch.Tensor) -> torch.Tensor:
        if self.dtype is torch.float32:
            return torch.softmax(scores, dim=-1)
        return torch.softmax(scores, dim=-1, dtype=torch.float32).to(self.dtype)


class _Step:
    def __init__(self, maths: TorchMaths, kv: KvArena, pieces: NDArray[np.int64]) -> None:
        self._maths = maths
        self._shape = shape = maths.shape
        self._kv = kv
        rows, counts, offsets, capacities, starts = pieces.T
        count = int(counts.sum())
        positions = np.arange(count) + np.repeat(starts - rows, counts)
        offset, capacity = np.repeat(offsets, counts), np.repeat(capacities, counts)
        width = shape.kv_heads * shape.head_dim
        key_slots = (offset * width + positions)[:, None] + np.arange(width) * capacity[:, None]
        value_slots = (offset * shape.kv_heads + positions)[:, None] + np.arange(shape.kv_heads) * capacity[:, None]
        self._key_slots, self._value_slots = self._tensor(key_slots.reshape(-1)), self._tensor(value_slots.reshape(-1))
        self._turn = maths.turns.index_select(0, self._tensor(positions)).view(count, 1, 1, -1)
        self._queries = torch.empty(
            count, shape.kv_heads, maths.rows, shape.head_dim, dtype=maths.dtype, device=maths.device
        )
        if maths.rows != shape.group:
            self._queries.zero_()
        self._attended = torch.empty(count, shape.heads * shape.head_dim, dtype=maths.dtype, device=maths.device)
        self._runs = [self._view_run(run) for run in runs_of(pieces)]
        chunks = (Chunk(*piece) for piece in pieces.tolist() if piece[1] > 1)
        self._chunks = [views for chunk in chunks for views in self._view_chunk(chunk)]

    def _tensor(self, array: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._maths.device)

    def place(self, index: int, layer: LayerWeights, qkv: torch.Tensor) -> None:
        maths, shape, count = self._maths, self._shape, qkv.shape[0]
        if layer.qkv_bias is not None:
            qkv += layer.qkv_bias
        turned = (shape.heads + shape.kv_heads) * shape.head_dim
        qk = qkv[:, :turned].view(count, shape.heads + shape.kv_heads, shape.head_dim)
        if layer.qk_norm is not None:
            qk = rms_norm(qk, layer.qk_norm, maths.head_floor)
        pairs = torch.view_as_complex(qk.float().view(*qk.shape[:-1], -1, 2))
        # Query heads grouped by their shared key-value head.
        query_pairs = pairs[:, : shape.heads].view(count, shape.kv_heads, shape.group, -1)
        if maths.dtype is torch.float32:
            turned_queries = torch.view_as_complex(self._queries.view(count, shape.kv_heads, maths.rows, -1, 2))
            torch.mul(query_pairs, self._turn, out=turned_queries[:, :, : shape.group])
        else:
            self._queries[:, :, : shape.group] = torch.view_as_real(query_pairs * self._turn).flatten(-2)
        keys = torch.view_as_real(pairs[:, shape.heads :] * self._turn[:, 0]).to(maths.dtype)
        self._kv.key_layers[index].scatter_(0, self._key_slots, keys.view(-1))
        values = qkv[:, turned:].reshape(-1, shape.head_dim)
        self._kv.value_layers[index].index_copy_(0, self._value_slots, values)

    def attend(self, index: int) -> torch.Tensor:
        for run in self._runs:
            self._attend_run(run, index)
        for chunk in self._chunks:
            self._attend_chunk(chunk, index)
        return self._attended

    # --- one token of each session

    def _view_run(self, run: Run) -> "_RunViews":
        shape, size = self._shape, len(run.lengths)
        length = min(run.capacity, -(-max(run.lengths) // LENGTH_GRAIN) * LENGTH_GRAIN)
        matrices = size * shape.kv_heads
        lengths = torch.tensor(run.lengths, device=self._maths.device).repeat_interleave(shape.kv_heads)
        unseen = torch.arange(length, device=self._maths.device) >= lengths[:, None]
        mask = torch.zeros(matrices, length, dtype=self._maths.dtype, device=self._maths.device)
        keys, values = self._kv.run(run.offset, run.capacity, size, length)
        rows = slice(run.row, run.row + size)
        return _RunViews(
            queries=self._queries[rows].view(matrices, self._maths.rows, shape.head_dim),
            keys=keys,
            values=values,
            mask=mask.masked_fill_(unseen, float("-inf"))[:, None],
            attended=self._attended[rows].view(matrices, shape.group, shape.head_dim),
        )

    def _attend_run(self, views: "_RunViews", index: int) -> None:
        maths, group = self._maths, self._shape.group
        scores = torch.baddbmm(views.mask, views.queries, views.keys[index], alpha=maths.scale)
        if maths.rows == group:
            torch.bmm(maths.softmax(scores), views.values[index], out=views.attended)
        else:
            views.attended.copy_(torch.bmm(maths.softmax(scores), views.values[index])[:, :group])

    # --- several tokens of one session

    def _view_chunk(self, chunk: Chunk) -> "Iterator[_ChunkViews]":
        """Split the chunk into parts whose scores fit into memory."""
        shape = self._shape
        per_part = max(1, MAX_SCORES // (shape.heads * (chunk.start + chunk.size)))
        for first in range(0, chunk.size, per_part):
            count = min(per_part, chunk.size - first)
            rows = slice(chunk.row + first, chunk.row + first + count)
            length = chunk.start + first + count
            keys, values = self._kv.run(chunk.offset, chunk.capacity, 1, length)
            attended = self._attended[rows].view(count, shape.kv_heads, shape.group, shape.head_dim)
            yield _ChunkViews(
                queries=self._queries[rows, :, : shape.group].permute(1, 2, 0, 3),
                keys=keys,
                values=values,
                mask=self._maths.mask(count, length),
                attended=attended.permute(1, 2, 0, 3),
            )

    def _attend_chunk(self, views: "_ChunkViews", index: int) -> None:
        maths, shape = self._maths, self._shape
        queries = views.queries.reshape(shape.kv_heads, -1, shape.head_dim)
        scores = torch.baddbmm(views.mask, queries, views.keys[index], alpha=maths.scale)
        out = torch.bmm(maths.softmax(scores), views.values[index])
        views.attended.copy_(out.view(views.attended.shape))


def runs_of(pieces: NDArray[np.int64]) -> list[Run]:
    """Group single tokens, which come first and in block order, into runs."""
    runs: list[Run] = []
    end = -1
    for row, count, offset, capacity, start in pieces.tolist():
        if count > 1:
            break
        if offset == end and runs[-1].capacity == capacity:
            runs[-1].lengths.append(start + 1)
        else:
            runs.append(Run(row, offset, capacity, [start + 1]))
        end = offset + capacity
    return runs


def rms_norm(x: torch.Tensor, weight: torch.Tensor, floor: torch.Tensor) -> torch.Tensor:
    """RMSNorm in float32, with few calls: for n numbers, floor = √(n·eps), and the weight is scaled by √n."""
    wide = x.float()
    size = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    return torch.div(wide, torch.hypot(size, floor)).mul_(weight).to(x.dtype)


class _RunViews(NamedTuple):
    """Operands of a run's products: the same tensors in every layer, except keys and values."""

    queries: torch.Tensor
    keys: Layers
    values: Layers
    mask: torch.Tensor
    """(size * kv heads, 1, length): 0 at the session's tokens, -inf elsewhere."""
    attended: torch.Tensor


class _ChunkViews(NamedTuple):
    """Operands of the products of a chunk or a part of one."""

    queries: torch.Tensor
    """(kv heads, group, count, dimension), not in this order in memory."""
    keys: Layers
    values: Layers
    mask: torch.Tensor
    """(group * count, length)."""
    attended: torch.Tensor
    """Like `queries`."""
