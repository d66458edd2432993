"""The forward pass with native kernels: on a CPU, in float32.

Invariants: a session's attention reads only its own keys and values, up to its own length; the number of sessions in a
step and the location of their blocks change nothing, not even the rounding.
"""

import ctypes

import numpy as np
import torch
from numpy.typing import NDArray

from rollart.backends.engines.checkpoint_config import ModelShape
from rollart.backends.engines.kv import KvArena
from rollart.backends.engines.rope import rotations
from rollart.backends.engines.weights import LayerWeights
from rollart.backends.native.kernels import MAX_HEAD_DIM, TILE, Heads, native_kernels


def native_maths(
    shape: ModelShape, *, dtype: torch.dtype, device: torch.device, max_context: int
) -> "NativeMaths | None":
    """Native kernels for this shape, device and precision; None if unavailable."""
    if device.type != "cpu" or dtype is not torch.float32 or shape.head_dim > MAX_HEAD_DIM:
        return None
    kernels = native_kernels()
    return None if kernels is None else NativeMaths(kernels, shape, max_context)


class NativeMaths:
    def __init__(self, kernels: ctypes.CDLL, shape: ModelShape, max_context: int) -> None:
        self.kernels = kernels
        self.shape = shape
        self.heads = ctypes.byref(Heads(shape.kv_heads, shape.group, shape.head_dim))
        self.turns = rotations(shape, max_context, torch.device("cpu"))
        self.scratch = torch.empty(0)
        self._floor = shape.hidden * shape.norm_eps

    def begin(self, kv: KvArena, pieces: NDArray[np.int64]) -> "_Step":
        return _Step(self, kv, np.ascontiguousarray(pieces))

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        rows, width = x.shape
        self.kernels.rms_norm(x.data_ptr(), weight.data_ptr(), self._floor, rows, width, out.data_ptr())
        return out

    def gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(rows, width)
        self.kernels.gated(gate_up.data_ptr(), rows, width, out.data_ptr())
        return out


class _Step:
    def __init__(self, maths: NativeMaths, kv: KvArena, pieces: NDArray[np.int64]) -> None:
        shape = maths.shape
        self._maths = maths
        self._kv = kv
        self._pieces = pieces
        self._arguments = maths.heads, pieces.ctypes.data, len(pieces)
        rows = int(pieces[:, 1].sum())
        self._queries = torch.empty(rows, shape.heads * shape.head_dim)
        self._attended = torch.empty_like(self._queries)
        room = TILE * int(pieces[:, 3].max())
        if maths.scratch.numel() < room:
            maths.scratch = torch.empty(room)

    def place(self, index: int, layer: LayerWeights, qkv: torch.Tensor) -> None:
        maths, shape = self._maths, self._maths.shape
        maths.kernels.place(
            *self._arguments,
            qkv.data_ptr(),
            None if layer.qkv_bias is None else layer.qkv_bias.data_ptr(),
            None if layer.qk_norm is None else layer.qk_norm.data_ptr(),
            shape.head_dim * shape.norm_eps,
            maths.turns.data_ptr(),
            shape.head_dim**-0.5,
            self._queries.data_ptr(),
            self._kv.key_layers[index].data_ptr(),
            self._kv.value_layers[index].data_ptr(),
        )

    def attend(self, index: int) -> torch.Tensor:
        self._maths.kernels.attend(
            *self._arguments,
            self._queries.data_ptr(),
            self._kv.key_layers[index].data_ptr(),
            self._kv.value_layers[index].data_ptr(),
            self._maths.scratch.data_ptr(),
            self._attended.data_ptr(),
        )
        return self._attended
