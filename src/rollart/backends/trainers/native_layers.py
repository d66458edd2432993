"""Layers of `transformers` with the native kernels inside: on a CPU, in float32.

    RMSNorm, the product of an MLP's gate, rotary positions: replaced where a model has them, by `quicken`
    attention over packed rows: by `packed_attention` itself

What holds: the same function and the same gradient, up to rounding; whatever the kernels do not serve (another device
or precision) goes the way it came. Parameters, their names and hooks around modules are untouched.
"""

import sys
from collections.abc import Callable
from ctypes import byref
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.autograd.function import once_differentiable

from rollart.backends.native.kernels import GRAIN, TILE, Heads, native_kernels

SILU = ("SiLU", "SiLUActivation")
"""By torch and by `transformers`."""


def serves(*tensors: torch.Tensor) -> bool:
    """Whether the kernels take these."""
    return all(each.device.type == "cpu" and each.dtype is torch.float32 for each in tensors) and (
        native_kernels() is not None
    )


def quicken(model: nn.Module) -> None:
    """Replace what there is a kernel for, in place."""
    if native_kernels() is None:
        return
    for module in model.modules():
        kind = type(module).__name__
        if kind.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            _replace(module, _norm)
        elif kind.endswith("MLP") and type(getattr(module, "act_fn", None)).__name__ in SILU:
            _replace(module, _mlp)
        elif kind.endswith("Attention"):
            _quicken_turns(sys.modules[type(module).__module__])


def _replace(module: nn.Module, quick: Callable[..., torch.Tensor]) -> None:
    plain = module.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        return quick(module, x) if serves(x) else plain(x)

    module.forward = forward


# --- norms


def _norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    return _RmsNorm.apply(x, module.weight, module.variance_epsilon)  # type: ignore[no-any-return,no-untyped-call]


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        x = x.contiguous()
        width = x.shape[-1]
        rows = x.numel() // width
        out, shares = torch.empty_like(x), x.new_empty(rows)
        native().rms_norm_shares(x.data_ptr(), weight.data_ptr(), eps, rows, width, out.data_ptr(), shares.data_ptr())
        ctx.save_for_backward(x, weight, shares)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, shares = ctx.saved_tensors
        gradient = gradient.contiguous()
        of_x, of_weight = torch.empty_like(x), torch.zeros_like(weight)
        width = x.shape[-1]
        memory = [each.data_ptr() for each in (x, weight, shares, gradient)]
        native().rms_norm_back(*memory, shares.numel(), width, of_x.data_ptr(), of_weight.data_ptr())
        return of_x, of_weight, None


# --- the product of an MLP's gate


def _mlp(module: Any, x: torch.Tensor) -> torch.Tensor:
    gate, up = module.gate_proj(x), module.up_proj(x)
    gated = _Gated.apply(gate, up) if serves(gate, up) else module.act_fn(gate) * up  # type: ignore[no-untyped-call]
    return module.down_proj(gated)  # type: ignore[no-any-return]


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        out = torch.empty_like(gate)
        native().gated_pair(gate.data_ptr(), up.data_ptr(), gate.numel(), out.data_ptr())
        ctx.save_for_backward(gate, up)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gate, up = ctx.saved_tensors
        gradient = gradient.contiguous()
        of_gate, of_up = torch.empty_like(gate), torch.empty_like(up)
        memory = [each.data_ptr() for each in (gate, up, gradient)]
        native().gated_pair_back(*memory, gate.numel(), of_gate.data_ptr(), of_up.data_ptr())
        return of_gate, of_up


# --- rotary positions


def _quicken_turns(definitions: Any) -> None:
    """`transformers` has the function beside the layers that call it, by its name."""
    plain = getattr(definitions, "apply_rotary_pos_emb", None)
    if plain is None or hasattr(plain, "plain"):
        return

    def apply_rotary_pos_emb(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if unsqueeze_dim != 1 or q.shape[-1] != cos.shape[-1] or cos.requires_grad or not serves(q, k, cos, sin):
            return plain(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)  # type: ignore[no-any-return]
        return _Turn.apply(q, cos, sin), _Turn.apply(k, cos, sin)  # type: ignore[no-untyped-call]

    apply_rotary_pos_emb.plain = plain  # type: ignore[attr-defined]
    definitions.apply_rotary_pos_emb = apply_rotary_pos_emb


class _Turn(torch.autograd.Function):
    """(batch, heads, positions, width), which in memory is (batch, positions, heads, width)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        size = (x.shape[0], *cos.shape[1:])
        cos, sin = cos.expand(size).contiguous(), sin.expand(size).contiguous()
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _turned(gradient, cos, sin, -1.0), None, None


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, direction: float) -> torch.Tensor:
    by_position = x.transpose(1, 2).contiguous()
    out = torch.empty_like(by_position)
    heads, width = by_position.shape[2:]
    memory = [each.data_ptr() for each in (by_position, cos, sin)]
    native().turn(*memory, direction, by_position.numel() // (heads * width), heads, width, out.data_ptr())
    return out.transpose(1, 2)


# --- attention


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: NDArray[np.int64], longest: int, scale: float
) -> torch.Tensor:
    """(1, heads, tokens, width) each, and (1, tokens, heads, width) what comes out. `layout`: as in `kernels.cpp`."""
    parts = (each.transpose(1, 2).contiguous() for each in (query, key, value))
    return _Attention.apply(*parts, layout, longest, scale)  # type: ignore[no-any-return,no-untyped-call]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layout: NDArray[np.int64],
        longest: int,
        scale: float,
    ) -> torch.Tensor:
        _, tokens, heads, width = query.shape
        kv_heads = key.shape[2]
        capacity = -(-longest // GRAIN) * GRAIN
        shape = Heads(kv_heads, heads // kv_heads, width)
        blocks, at = 0, 0
        while at < len(layout):
            blocks, at = blocks + 1, at + 2 + int(layout[at + 1])
        ctx.fixed = byref(shape), layout.ctypes.data, blocks, capacity
        ctx.layout, ctx.scale = layout, scale
        out, logsums = torch.empty_like(query), query.new_empty(tokens, heads)
        scratch = query.new_empty((2 * width + TILE) * capacity)
        inputs = [each.data_ptr() for each in (query, key, value)]
        native().packed_attend(*ctx.fixed, *inputs, scale, *(each.data_ptr() for each in (scratch, out, logsums)))
        ctx.save_for_backward(query, key, value, out, logsums)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, logsums = ctx.saved_tensors
        gradient = gradient.contiguous()
        of_query, of_key, of_value = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        width, capacity = query.shape[-1], ctx.fixed[3]
        scratch = query.new_empty((5 * width + 2 * TILE) * capacity)
        inputs = [each.data_ptr() for each in (query, key, value)]
        rest = [each.data_ptr() for each in (scratch, out, logsums, gradient, of_query, of_key, of_value)]
        native().packed_attend_back(*ctx.fixed, *inputs, ctx.scale, *rest)
        return of_query, of_key, of_value, None, None, None


def native() -> Any:
    """The kernels, where `serves` said that there are some."""
    kernels = native_kernels()
    assert kernels is not None
    return kernels
