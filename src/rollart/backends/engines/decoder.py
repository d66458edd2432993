"""The forward pass: some new tokens of some sessions, against the KV that the arena holds for them.

A step packs tokens of many sessions into one matrix. Sessions with one new token whose blocks lie side by side are a
`Run`, attended to by one batched product; a session with several new tokens is a `Chunk`. Query heads that share a
key-value head are rows of one small matrix, so grouped-query attention repeats nothing.

What holds: what a session's tokens give depends on its own tokens and the weights alone, up to the rounding of matrix
products of another height; only the rows that are asked for go through the output head.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the name that torch's own documentation uses

from rollart.backends.engines.checkpoint_config import ModelShape
from rollart.backends.engines.kv import KvArena, Layers
from rollart.backends.engines.rope import rotations
from rollart.backends.engines.weights import LayerWeights, ModelWeights

MIN_GROUP_ROWS = 4
"""Batched products of fewer rows are slower than those of four with zeros in them."""
LENGTH_GRAIN = 16
"""A run is attended to up to a multiple of this many positions."""
SMALL_MASK = 8192
"""Masks of so many numbers, which is what the next turn of an agent has, are kept for others of their size."""
SMALL_MASKS = 512
MAX_SCORES = 1 << 22
"""Attention scores that are in memory at once; longer chunks are attended to in parts."""


class Run(NamedTuple):
    """Decoding sessions in blocks side by side; their tokens are the rows from `row` on."""

    row: int
    size: int
    offset: int
    capacity: int
    length: int
    """Of the longest of their contexts, the new token included."""


class Chunk(NamedTuple):
    """`size` new tokens of one session, from position `start` on."""

    row: int
    size: int
    offset: int
    capacity: int
    start: int


class StepPlan(NamedTuple):
    """What one forward pass computes. All indices are into the packed tokens or into the arena."""

    tokens: torch.Tensor
    positions: torch.Tensor
    places: torch.Tensor
    """Of each token: the place in the arena that its KV goes to."""
    key_slots: torch.Tensor
    value_slots: torch.Tensor
    runs: Sequence[Run]
    chunks: Sequence[Chunk]
    outputs: torch.Tensor | None
    """Rows whose logits are wanted; None: all of them."""


class Decoder:
    """The function of one architecture; weights and KV come with every call."""

    def __init__(self, shape: ModelShape, *, dtype: torch.dtype, device: torch.device, max_context: int) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self._rotations = rotations(shape, max_context, device)
        self._rows = max(shape.group, MIN_GROUP_ROWS)
        self._scale = shape.head_dim**-0.5
        self._hidden_floor = torch.full((1,), (shape.hidden * shape.norm_eps) ** 0.5, device=device)
        self._head_floor = torch.full((1,), (shape.head_dim * shape.norm_eps) ** 0.5, device=device)
        self._small_mask = lru_cache(SMALL_MASKS)(self._causal_mask)

    @torch.inference_mode()
    def forward(self, weights: ModelWeights, kv: KvArena, plan: StepPlan) -> torch.Tensor:
        """Write the KV of the plan's tokens and give the logits of its output rows, in float32."""
        shape, count = self.shape, plan.tokens.shape[0]
        kv.mask.index_fill_(0, plan.places, 0.0)
        turn = self._rotations.index_select(0, plan.positions).view(count, 1, 1, -1)
        x = weights.embedding.index_select(0, plan.tokens)
        queries = self._empty(count, shape.kv_heads, self._rows, shape.head_dim)
        if self._rows != shape.group:
            queries.zero_()
        attended = self._empty(count, shape.heads * shape.head_dim)
        runs = [self._view_run(queries, attended, kv, run) for run in plan.runs]
        chunks = [views for chunk in plan.chunks for views in self._view_chunk(queries, attended, kv, chunk)]
        for index, layer in enumerate(weights.layers):
            self._project(layer, x, turn, queries, kv, index, plan)
            last = index == shape.layers - 1
            if last and plan.outputs is not None and not plan.outputs.shape[0]:
                break  # only the KV was wanted
            for run in runs:
                self._attend_run(run, index)
            for chunk in chunks:
                self._attend_chunk(chunk, index)
            if last and plan.outputs is not None:
                x, attended = x.index_select(0, plan.outputs), attended.index_select(0, plan.outputs)
            self._finish_layer(layer, x, attended)
        if plan.outputs is not None and not plan.outputs.shape[0]:
            return torch.empty(0, shape.vocabulary, device=self.device)
        return weights.head.times(_rms_norm(x, weights.norm, self._hidden_floor)).float()

    def _project(
        self,
        layer: LayerWeights,
        x: torch.Tensor,
        turn: torch.Tensor,
        queries: torch.Tensor,
        kv: KvArena,
        index: int,
        plan: StepPlan,
    ) -> None:
        """Queries of this layer into `queries`, keys and values into the arena."""
        shape, count = self.shape, x.shape[0]
        normed = _rms_norm(x, layer.attention_norm, self._hidden_floor)
        qkv = layer.qkv.times(normed)
        if layer.qkv_bias is not None:
            qkv += layer.qkv_bias
        turned = (shape.heads + shape.kv_heads) * shape.head_dim
        qk = qkv[:, :turned].view(count, shape.heads + shape.kv_heads, shape.head_dim)
        if layer.qk_norm is not None:
            qk = _rms_norm(qk, layer.qk_norm, self._head_floor)
        pairs = torch.view_as_complex(qk.float().view(*qk.shape[:-1], -1, 2))
        # Query heads in groups by the key-value head that they share.
        query_pairs = pairs[:, : shape.heads].view(count, shape.kv_heads, shape.group, -1)
        if self.dtype is torch.float32:
            turned_queries = torch.view_as_complex(queries.view(count, shape.kv_heads, self._rows, -1, 2))
            torch.mul(query_pairs, turn, out=turned_queries[:, :, : shape.group])
        else:
            queries[:, :, : shape.group] = torch.view_as_real(query_pairs * turn).flatten(-2)
        keys = torch.view_as_real(pairs[:, shape.heads :] * turn[:, 0]).to(self.dtype)
        kv.key_layers[index].scatter_(0, plan.key_slots, keys.view(-1))
        kv.value_layers[index].index_copy_(0, plan.value_slots, qkv[:, turned:].reshape(-1, shape.head_dim))

    def _finish_layer(self, layer: LayerWeights, x: torch.Tensor, attended: torch.Tensor) -> None:
        """The output projection and the feed-forward part, added to `x` in place."""
        shape = self.shape
        layer.output.add_times(attended, x)
        if layer.output_bias is not None:
            x += layer.output_bias
        normed = _rms_norm(x, layer.mlp_norm, self._hidden_floor)
        gate_up = layer.gate_up.times(normed)
        activated = F.silu(gate_up[:, : shape.intermediate]).mul_(gate_up[:, shape.intermediate :])
        layer.down.add_times(activated, x)

    # --- attention

    def _view_run(self, queries: torch.Tensor, attended: torch.Tensor, kv: KvArena, run: Run) -> "_RunViews":
        shape = self.shape
        length = min(run.capacity, -(-run.length // LENGTH_GRAIN) * LENGTH_GRAIN)
        matrices = run.size * shape.kv_heads
        mask = kv.mask[run.offset : run.offset + run.size * run.capacity].view(run.size, 1, run.capacity)
        keys, values = kv.run(run.offset, run.capacity, run.size, length)
        rows = slice(run.row, run.row + run.size)
        return _RunViews(
            queries=queries[rows].view(matrices, self._rows, shape.head_dim),
            keys=keys,
            values=values,
            mask=mask[:, :, :length].expand(run.size, shape.kv_heads, length).reshape(matrices, 1, length),
            attended=attended[rows].view(matrices, shape.group, shape.head_dim),
        )

    def _attend_run(self, views: "_RunViews", layer: int) -> None:
        scores = torch.baddbmm(views.mask, views.queries, views.keys[layer], alpha=self._scale)
        if self._rows == self.shape.group:
            torch.bmm(self._softmax(scores), views.values[layer], out=views.attended)
        else:
            views.attended.copy_(torch.bmm(self._softmax(scores), views.values[layer])[:, : self.shape.group])

    def _view_chunk(
        self, queries: torch.Tensor, attended: torch.Tensor, kv: KvArena, chunk: Chunk
    ) -> "Iterator[_ChunkViews]":
        """The chunk, in parts whose scores fit into memory."""
        shape = self.shape
        per_part = max(1, MAX_SCORES // (shape.heads * (chunk.start + chunk.size)))
        for first in range(0, chunk.size, per_part):
            size = min(per_part, chunk.size - first)
            rows = slice(chunk.row + first, chunk.row + first + size)
            length = chunk.start + first + size
            keys, values = kv.run(chunk.offset, chunk.capacity, 1, length)
            yield _ChunkViews(
                queries=queries[rows, :, : shape.group].permute(1, 2, 0, 3),
                keys=keys,
                values=values,
                mask=self._mask(size, length),
                attended=attended[rows].view(size, shape.kv_heads, shape.group, shape.head_dim).permute(1, 2, 0, 3),
            )

    def _attend_chunk(self, views: "_ChunkViews", layer: int) -> None:
        shape = self.shape
        queries = views.queries.reshape(shape.kv_heads, -1, shape.head_dim)
        scores = torch.baddbmm(views.mask, queries, views.keys[layer], alpha=self._scale)
        out = torch.bmm(self._softmax(scores), views.values[layer])
        views.attended.copy_(out.view(views.attended.shape))

    def _mask(self, size: int, length: int) -> torch.Tensor:
        small = self.shape.group * size * length <= SMALL_MASK
        return self._small_mask(size, length) if small else self._causal_mask(size, length)

    def _causal_mask(self, size: int, length: int) -> torch.Tensor:
        """For the last `size` of `length` positions: -inf at those after the query's own. Once for each of a group."""
        mask = torch.zeros(size, length, dtype=self.dtype, device=self.device)
        mask[:, length - size :] = torch.full((size, size), float("-inf"), dtype=self.dtype, device=self.device).triu_(
            1
        )
        return mask.repeat(self.shape.group, 1)

    def _softmax(self, scores: torch.Tensor) -> torch.Tensor:
        if self.dtype is torch.float32:
            return torch.softmax(scores, dim=-1)
        return torch.softmax(scores, dim=-1, dtype=torch.float32).to(self.dtype)

    def _empty(self, *size: int) -> torch.Tensor:
        return torch.empty(size, dtype=self.dtype, device=self.device)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, floor: torch.Tensor) -> torch.Tensor:
    """In float32, with few calls: for n numbers, floor = √(n·eps) and the weight times √n it is RMSNorm."""
    wide = x.float()
    size = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    return torch.div(wide, torch.hypot(size, floor)).mul_(weight).to(x.dtype)


class _RunViews(NamedTuple):
    """A run as its products take it: the same tensors in every layer, but for keys and values."""

    queries: torch.Tensor
    keys: Layers
    values: Layers
    mask: torch.Tensor
    """(size * kv heads, 1, length): 0 where a session holds a token, -inf where it does not."""
    attended: torch.Tensor


class _ChunkViews(NamedTuple):
    """A chunk, or a part of one, as its products take it."""

    queries: torch.Tensor
    """(kv heads, group, size, dimension), not in this order in memory."""
    keys: Layers
    values: Layers
    mask: torch.Tensor
    """(group * size, length)."""
    attended: torch.Tensor
    """Like `queries`."""
