"""Layers of `transformers` with native kernels inside, on a CPU in float32.

    RMSNorm, the gated product of an MLP, rotary embeddings: replaced by `use_native_kernels` where a model has them
    attention over packed rows: by `packed_attention` itself

Invariants: the function and its gradient are the same up to rounding; on other devices or precisions the original code
runs. Parameters, their names and hooks on modules are untouched.
"""

from collections.abc import Callable
from ctypes import byref
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.autograd.function import once_differentiable

from rollart.backends.native.kernels import ALIGN, TILE, Heads, native_kernels
from rollart.types.errors import InvariantBroken

SILU = ("SiLU", "SiLUActivation")
"""Class names in torch and in `transformers`."""
TURNS = "apply_rotary_pos_emb"
Turned = tuple[torch.Tensor, torch.Tensor]


def serves(*tensors: torch.Tensor) -> bool:
    """Whether the kernels support these tensors."""
    return all(each.device.type == "cpu" and each.dtype is torch.float32 for each in tensors) and (
        native_kernels() is not None
    )


def use_native_kernels(model: nn.Module) -> None:
    """Replace layers that have a native kernel, in place."""
    if native_kernels() is None:
        return
    for module in model.modules():
        kind = type(module).__name__
        if kind.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            _replace(module, _norm)
        elif kind.endswith("MLP") and type(getattr(module, "act_fn", None)).__name__ in SILU:
            _replace(module, _mlp)
        elif kind.endswith("Attention"):
            _use_native_rotary(module)


def _replace(module: nn.Module, quick: Callable[..., torch.Tensor]) -> None:
    plain = module.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        # Check the weights too: several ranks gather them in the compute precision.
        return quick(module, x) if serves(x, *module.parameters(recurse=False)) else plain(x)

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
        native().rms_norm_shares(_at(x), _at(weight), eps, rows, width, _at(out), _at(shares))
        ctx.save_for_backward(x, weight, shares)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, shares = ctx.saved_tensors
        gradient = gradient.contiguous()
        of_x, of_weight = torch.empty_like(x), torch.zeros_like(weight)
        width = x.shape[-1]
        memory = [_at(each) for each in (x, weight, shares, gradient)]
        native().rms_norm_back(*memory, shares.numel(), width, _at(of_x), _at(of_weight))
        return of_x, of_weight, None


# --- the gated product of an MLP


def _mlp(module: Any, x: torch.Tensor) -> torch.Tensor:
    gate, up = module.gate_proj(x), module.up_proj(x)
    gated = _Gated.apply(gate, up) if serves(gate, up) else module.act_fn(gate) * up  # type: ignore[no-untyped-call]
    return module.down_proj(gated)  # type: ignore[no-any-return]


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        out = torch.empty_like(gate)
        native().gated_pair(_at(gate), _at(up), gate.numel(), _at(out))
        ctx.save_for_backward(gate, up)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gate, up = ctx.saved_tensors
        gradient = gradient.contiguous()
        of_gate, of_up = torch.empty_like(gate), torch.empty_like(up)
        memory = [_at(each) for each in (gate, up, gradient)]
        native().gated_pair_back(*memory, gate.numel(), _at(of_gate), _at(of_up))
        return of_gate, of_up


# --- rotary embeddings


def _use_native_rotary(module: nn.Module) -> None:
    """Rebind the rotary function in this module's own `forward`.

    The `transformers` module is not patched: other models in this process are unaffected.
    """
    forward = getattr(module.forward, "__func__", None)
    if not isinstance(forward, FunctionType) or TURNS not in forward.__code__.co_names:
        return
    names = {**forward.__globals__, TURNS: _native_rotary(forward.__globals__[TURNS])}
    quick = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    quick.__kwdefaults__ = forward.__kwdefaults__
    module.forward = MethodType(quick, module)


def _native_rotary(plain: Callable[..., Turned]) -> Callable[..., Turned]:
    def apply_rotary_pos_emb(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
    ) -> Turned:
        if unsqueeze_dim != 1 or q.shape[-1] != cos.shape[-1] or cos.requires_grad or not serves(q, k, cos, sin):
            return plain(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        return _Turn.apply(q, cos, sin), _Turn.apply(k, cos, sin)  # type: ignore[no-untyped-call]

    return apply_rotary_pos_emb


class _Turn(torch.autograd.Function):
    """(batch, heads, positions, width), stored as (batch, positions, heads, width)."""

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
    memory = [_at(each) for each in (by_position, cos, sin)]
    native().turn(*memory, direction, by_position.numel() // (heads * width), heads, width, _at(out))
    return out.transpose(1, 2)


# --- attention


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    branches: NDArray[np.int64],
    scale: float,
    wanted: NDArray[np.bool_] | None = None,
) -> torch.Tensor:
    """Attention over packed rows. Inputs: (1, heads, tokens, width) each; output: (1, tokens, heads, width).

    `branches`: (sequences, 2), as in `kernels.cpp`. The output is zero for tokens that are not `wanted`.
    """
    parts = (each.transpose(1, 2).contiguous() for each in (query, key, value))
    return _Attention.apply(*parts, branches, scale, wanted)  # type: ignore[no-any-return,no-untyped-call]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        branches: NDArray[np.int64],
        scale: float,
        wanted: NDArray[np.bool_] | None,
    ) -> torch.Tensor:
        _, tokens, heads, width = query.shape
        kv_heads = key.shape[2]
        capacity = -(-int(branches.sum(1).max()) // ALIGN) * ALIGN
        ctx.branches, ctx.scale, ctx.wanted = branches, scale, wanted
        ctx.fixed = byref(Heads(kv_heads, heads // kv_heads, width)), branches.ctypes.data, len(branches), capacity
        out, logsums = _like(query, wanted), query.new_empty(tokens, heads)
        scratch = query.new_empty((2 * width + TILE) * capacity)
        inputs = [_at(each) for each in (query, key, value)]
        rest = [_at(each) for each in (scratch, out, logsums)]
        native().packed_attend(*ctx.fixed, *inputs, scale, _flags(wanted), *rest)
        ctx.save_for_backward(query, key, value, out, logsums)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, logsums = ctx.saved_tensors
        gradient = gradient.contiguous()
        of_query, of_key, of_value = _like(query, ctx.wanted), torch.empty_like(key), torch.empty_like(value)
        width, capacity = query.shape[-1], ctx.fixed[3]
        scratch = query.new_empty((5 * width + 2 * TILE) * capacity)
        inputs = [_at(each) for each in (query, key, value)]
        rows = torch.empty(capacity, dtype=torch.int64)
        rest = [_at(each) for each in (scratch, out, logsums, gradient, of_query, of_key, of_value)]
        native().packed_attend_back(*ctx.fixed, *inputs, ctx.scale, _flags(ctx.wanted), rows.data_ptr(), *rest)
        return of_query, of_key, of_value, None, None, None


def _like(query: torch.Tensor, wanted: NDArray[np.bool_] | None) -> torch.Tensor:
    """An output buffer; zeroed if only the wanted tokens will be written."""
    return torch.empty_like(query) if wanted is None else torch.zeros_like(query)


def _flags(wanted: NDArray[np.bool_] | None) -> int | None:
    return None if wanted is None else wanted.ctypes.data


def _at(tensor: torch.Tensor) -> int:
    """Data pointer for a kernel. Kernels do no checks of their own, so unsupported tensors are rejected here."""
    if tensor.dtype is not torch.float32 or tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise InvariantBroken(f"a kernel got {tensor.dtype} on {tensor.device}, strides {tensor.stride()}")
    return tensor.data_ptr()


def native() -> Any:
    """The kernels; call only where `serves` returned True."""
    kernels = native_kernels()
    assert kernels is not None
    return kernels
