"""Attention over a packed row, for every model of `transformers` that takes its attention function from outside.

    row       | prompt A | rest A1 | rest A2 | prompt B | …        queries, keys and values of all sequences
    sees      itself      A + A1    A + A2    itself                causally; nothing sees another sequence

What holds: the output of every token is that of its sequence alone, as if each had been computed by itself; the keys
and values of a shared prompt are computed once and collect the gradients of all that see them; the work grows with the
square of sequences, not of the row.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from rollart.backends.trainers.native_layers import attend, serves

NAME = "rollart_packed"
CHUNK_TOKENS = 1024
"""A rest is computed in chunks of so many queries, so that masks stay small however long sequences are."""
MASKS_KEPT = 32
"""For one row; what is beyond them is made again in every layer."""
CHANGES_ATTENTION = ("sliding_window", "softcap", "s_aux", "position_bias", "cache")
"""Arguments by which models ask for another attention than the causal one over everything before."""


class UnsupportedAttention(Exception):
    """The model asks for attention that a packed row cannot have."""


class Block(NamedTuple):
    """A prompt and those who see it, by their lengths in the row. A sequence alone is a prompt that nobody sees."""

    prompt: int
    rests: tuple[int, ...] = ()


class Layout:
    """Where the sequences of a row lie. `calls` counts the layers that asked."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.blocks = tuple(blocks)
        self.sizes = [size for block in self.blocks for size in (block.prompt, *block.rests)]
        self.calls = 0
        self.numbers = np.array(
            [number for block in self.blocks for number in (block.prompt, len(block.rests), *block.rests)],
            dtype=np.int64,
        )
        """As the native kernels take it."""
        self.longest = max(block.prompt + max(block.rests, default=0) for block in self.blocks)
        self._masks: dict[tuple[int, int, torch.dtype, torch.device], torch.Tensor] = {}

    def mask(self, before: int, queries: torch.Tensor) -> torch.Tensor:
        """Queries see the `before` keys that precede them and, causally, their own. Made once for all layers."""
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
    """(1, heads, tokens, width) each, fewer heads in `key` and `value` where groups share them."""
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
        return attend(query, key, value, layout.numbers, layout.longest, scale), None
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    # Split at once: its backward joins the pieces, where that of slices would add up a whole row for each.
    pieces = zip(*(torch.split(tensor, layout.sizes, 2) for tensor in (query, key, value)), strict=True)
    out = []
    for block in layout.blocks:
        q, k, v = next(pieces)
        out.append(scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling))
        for _ in block.rests:
            rest_q, rest_k, rest_v = next(pieces)
            seen_k, seen_v = torch.cat((k, rest_k), 2), torch.cat((v, rest_v), 2)
            before = block.prompt
            for chunk in torch.split(rest_q, CHUNK_TOKENS, 2):
                end = before + chunk.shape[2]
                mask = layout.mask(before, chunk)
                seen = seen_k[:, :, :end], seen_v[:, :, :end]
                out.append(scaled_dot_product_attention(chunk, *seen, attn_mask=mask, scale=scaling))
                before = end
    return torch.cat(out, 2).transpose(1, 2), None


def _why(asked: Sequence[str], mask: torch.Tensor | None, dropout: float, layout: Layout | None) -> str:
    if asked:
        return f"its attention asks for {', '.join(asked)}"
    if layout is None:
        return "its layers do not pass arguments on to their attention"
    if mask is not None:
        return "it makes an attention mask of its own"
    return "its attention has dropout" if dropout else "its layers do not see the whole row"


AttentionInterface.register(NAME, packed_attention)
