"""Attention over a packed row, for every `transformers` model with a replaceable attention function.

    row       | A 0 … 9 | A1 7 … 12 | A2 7 … 9 | B 0 … 5 | …        queries, keys and values of all sequences
    sees      itself      A 0 … 6     A 0 … 6    itself              and itself, causally

A row holds branches: a sequence that shares a prefix with the one before it is stored from where they diverge.

Invariants:
- The output of every token equals that of its sequence computed alone (in the last layer: of every token used
  afterwards).
- Keys and values of a shared prefix are computed once and accumulate the gradients of all sequences that see them.
- The cost grows with the square of sequence lengths, not of the row.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from rollart.backends.trainers.native_layers import attend, serves

NAME = "rollart_packed"
CHUNK_TOKENS = 1024
"""Maximum queries per chunk of a branch after its shared prefix, so that masks stay small for long sequences."""
MASKS_KEPT = 32
"""Masks cached per row; further ones are rebuilt in every layer."""
LAST = "rollart_last"
"""Attribute that marks the modules of the last layer."""
CHANGES_ATTENTION = ("sliding_window", "softcap", "s_aux", "position_bias", "cache")
"""Arguments with which models request something other than plain causal attention."""


class UnsupportedAttention(Exception):
    """The model requests attention that a packed row does not support."""


class Branch(NamedTuple):
    """`size` tokens that continue the first `before` tokens of the previous sequence in the row."""

    before: int
    size: int


class Layout:
    """Positions of the sequences in a row. `calls` counts the layers that used it."""

    def __init__(self, branches: Sequence[Branch], kept: NDArray[np.int64]) -> None:
        """`kept`: sorted positions whose output is used after the last layer."""
        self.branches = tuple(branch for branch in branches if branch.size)
        self.sizes = [branch.size for branch in self.branches]
        self.kept = kept
        self.is_kept = np.zeros(sum(self.sizes), dtype=np.bool_)
        self.is_kept[kept] = True
        self.numbers = np.array(self.branches, dtype=np.int64)
        self.calls = 0
        self._masks: dict[tuple[int, int, torch.dtype, torch.device], torch.Tensor] = {}

    def mask(self, before: int, queries: torch.Tensor) -> torch.Tensor:
        """Queries see the `before` preceding keys and, causally, their own. Cached for all layers."""
        count = queries.shape[2]
        key = (before, count, queries.dtype, queries.device)
        mask = self._masks.get(key)
        if mask is None:
            unseen = torch.full((count, before + count), -torch.inf, dtype=queries.dtype, device=queries.device)
            mask = unseen.triu(before + 1)
            if len(self._masks) < MASKS_KEPT:
                self._masks[key] = mask
        return mask


def packed_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    layout: Layout | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Inputs: (1, heads, tokens, width) each; `key` and `value` may have fewer heads (grouped-query attention)."""
    asked = [name for name in CHANGES_ATTENTION if others.get(name) is not None]
    if asked or attention_mask is not None or dropout or layout is None or sum(layout.sizes) != query.shape[2]:
        raise UnsupportedAttention(_why(asked, attention_mask, dropout, layout))
    if not getattr(module, "is_causal", True):
        raise UnsupportedAttention("its attention is not causal")
    layout.calls += 1
    if torch.is_autocast_enabled(query.device.type):
        kind = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(kind), key.to(kind), value.to(kind)
    if serves(query, key, value):
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        wanted = layout.is_kept if getattr(module, LAST, False) else None
        return attend(query, key, value, layout.numbers, scale, wanted), None
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    # One split: its backward concatenates the pieces, while that of slices would sum a full row for each.
    pieces = zip(*(torch.split(tensor, layout.sizes, 2) for tensor in (query, key, value)), strict=True)
    out = []
    path: list[_Seen] = []
    for branch, (q, k, v) in zip(layout.branches, pieces, strict=True):
        path = [*_first(path, branch.before), _Seen(k, v)]
        if not branch.before:
            out.append(scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling))
            continue
        every_k, every_v = (torch.cat(parts, 2) for parts in zip(*path, strict=True))
        before = branch.before
        for chunk in torch.split(q, CHUNK_TOKENS, 2):
            end = before + chunk.shape[2]
            seen = every_k[:, :, :end], every_v[:, :, :end]
            out.append(scaled_dot_product_attention(chunk, *seen, attn_mask=layout.mask(before, chunk), scale=scaling))
            before = end
    return torch.cat(out, 2).transpose(1, 2), None


class _Seen(NamedTuple):
    """Keys and values of some tokens of a sequence."""

    key: torch.Tensor
    value: torch.Tensor


def _first(path: Sequence[_Seen], count: int) -> list[_Seen]:
    """The first `count` tokens of a sequence."""
    kept = []
    for key, value in path:
        if count:
            size = min(count, key.shape[2])
            kept.append(_Seen(key[:, :, :size], value[:, :, :size]))
            count -= size
    return kept


def _why(asked: Sequence[str], mask: torch.Tensor | None, dropout: float, layout: Layout | None) -> str:
    if asked:
        return f"its attention uses {', '.join(asked)}"
    if layout is None:
        return "its layers do not pass extra arguments to their attention"
    if mask is not None:
        return "it builds its own attention mask"
    return "its attention has dropout" if dropout else "its layers do not see the whole row"


AttentionInterface.register(NAME, packed_attention)
