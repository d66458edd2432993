"""The forward pass: new tokens of several sessions, against the KV that the arena holds for them.

A step packs tokens of many sessions into one matrix. Everything between the matrix products is done by the native
kernels (`native_step`) if available, else by torch operations (`torch_step`), on any device and in any precision.

Invariants: the result for a session depends only on its own tokens and the weights: bit for bit with the native
kernels, with torch up to the rounding of matrix products of different heights. Only the requested rows go through the
output head.
"""

from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from rollart.backends.engines.checkpoint_config import ModelShape
from rollart.backends.engines.kv import KvArena
from rollart.backends.engines.native_step import native_maths
from rollart.backends.engines.torch_step import TorchMaths
from rollart.backends.engines.weights import LayerWeights, ModelWeights


class StepPlan(NamedTuple):
    """Input of one forward pass."""

    tokens: torch.Tensor
    pieces: NDArray[np.int64]
    """Per session: its first token row and row count, offset and capacity of its block, its first position."""
    outputs: torch.Tensor | None
    """Rows whose logits are requested; None = all."""


class Step(Protocol):
    """The attention part of a forward pass."""

    def place(self, index: int, layer: LayerWeights, qkv: torch.Tensor) -> None:
        """Store the queries of this layer, and write its keys and values to the arena."""

    def attend(self, index: int) -> torch.Tensor:
        """Attention output: (tokens, heads * head_dim), in the same memory for every layer."""


class Maths(Protocol):
    """Operations other than matrix products."""

    def begin(self, kv: KvArena, pieces: NDArray[np.int64]) -> Step: ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor: ...

    def gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu of the first half of every row, times the second."""


class Decoder:
    """Forward function of one architecture; weights and KV are arguments of every call."""

    def __init__(self, shape: ModelShape, *, dtype: torch.dtype, device: torch.device, max_context: int) -> None:
        self.shape = shape
        self._device = device
        self._maths: Maths = native_maths(shape, dtype=dtype, device=device, max_context=max_context) or TorchMaths(
            shape, dtype=dtype, device=device, max_context=max_context
        )

    @torch.inference_mode()
    def forward(self, weights: ModelWeights, kv: KvArena, plan: StepPlan) -> torch.Tensor:
        """Write the KV of the plan's tokens and return the logits of its output rows, in float32."""
        maths = self._maths
        step = maths.begin(kv, plan.pieces)
        x = weights.embedding.index_select(0, plan.tokens)
        for index, layer in enumerate(weights.layers):
            step.place(index, layer, layer.qkv.times(maths.rms_norm(x, layer.attention_norm)))
            last = index == self.shape.layers - 1
            if last and plan.outputs is not None and not plan.outputs.shape[0]:
                return torch.empty(0, self.shape.vocabulary, device=self._device)  # only the KV was requested
            attended = step.attend(index)
            if last and plan.outputs is not None:
                x, attended = x.index_select(0, plan.outputs), attended.index_select(0, plan.outputs)
            layer.output.add_times(attended, x)
            if layer.output_bias is not None:
                x += layer.output_bias
            gate_up = layer.gate_up.times(maths.rms_norm(x, layer.mlp_norm))
            layer.down.add_times(maths.gated(gate_up), x)
        return weights.head.times(maths.rms_norm(x, weights.norm)).float()
