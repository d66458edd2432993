"""A model's weights in the decoder's layout: fused, ordered and converted once, before they are served.

Invariants: `prepare` does all the work while the previous version serves, so that putting a version into service is
only an assignment; a version with a non-finite number never becomes ready (it would poison cached keys).
"""

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass

import torch

from rollart.backends.engines.checkpoint_config import ModelShape
from rollart.backends.native.kernels import ALIGN, native_kernels
from rollart.types.errors import WeightError


class Matrix:
    """A weight matrix in the layout with the fastest product.

    For the native kernels (CPU, float32), in panels. Otherwise as a copy, which torch aligns; buffers of a store need
    not be aligned. Then matrices that widen are stored as (inputs, outputs), those that narrow the other way: a batch
    of one is twice as fast.
    """

    __slots__ = ("_kernels", "_outputs", "_weights")

    def __init__(self, weight: torch.Tensor, *, plain: torch.Tensor | None = None) -> None:
        """`weight` is (outputs, inputs); `plain` is the same matrix in memory that stays allocated anyway."""
        self._outputs, inputs = weight.shape
        native = weight.device.type == "cpu" and weight.dtype is torch.float32
        self._kernels = native_kernels() if native else None
        if self._kernels is not None:
            weight = weight.contiguous()
            self._weights = torch.empty(-(-self._outputs // (2 * ALIGN)) * 2 * ALIGN * inputs)
            self._kernels.lay_panels(weight.data_ptr(), self._outputs, inputs, self._weights.data_ptr())
        elif plain is not None:
            self._weights = plain.t()
        else:
            self._weights = weight.t().contiguous() if self._outputs > inputs else weight.clone().t()

    def times(self, rows: torch.Tensor) -> torch.Tensor:
        """The product of `rows` with the matrix."""
        if self._kernels is None:
            return torch.mm(rows, self._weights)
        out = rows.new_empty(rows.shape[0], self._outputs)
        self._multiply(rows, out, add=False)
        return out

    def add_times(self, rows: torch.Tensor, total: torch.Tensor) -> None:
        """The same, added to `total`."""
        if self._kernels is None:
            total.addmm_(rows, self._weights)
        else:
            self._multiply(rows, total, add=True)

    def _multiply(self, rows: torch.Tensor, out: torch.Tensor, *, add: bool) -> None:
        assert self._kernels is not None
        assert rows.is_contiguous()
        assert out.is_contiguous()
        count, inputs = rows.shape
        weights = self._weights.data_ptr()
        self._kernels.multiply(rows.data_ptr(), count, inputs, weights, self._outputs, add, out.data_ptr())


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """Weights of one layer. Norm weights are in float32, multiplied by √n for norms of n numbers."""

    attention_norm: torch.Tensor
    qkv: Matrix
    qkv_bias: torch.Tensor | None
    qk_norm: torch.Tensor | None
    """Norm weights of every query and key head: (heads + kv heads, head_dim)."""
    output: Matrix
    output_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: Matrix
    down: Matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWeights:
    embedding: torch.Tensor
    """(vocabulary, hidden)."""
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: Matrix


def wanted_tensors(shape: ModelShape, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Tensors that a version must consist of, without memory."""
    return {name: torch.empty(size, dtype=dtype, device="meta") for name, size in shape.tensors().items()}


def prepare(
    tensors: Mapping[str, torch.Tensor], shape: ModelShape, *, dtype: torch.dtype, device: torch.device
) -> Generator[None, None, ModelWeights]:
    """Fuse the weights of a state dict, a layer per step of the generator."""

    def get(name: str) -> torch.Tensor:
        tensor = tensors[name]
        low, high = tensor.aminmax()
        if not (torch.isfinite(low) and torch.isfinite(high)):
            raise WeightError(f"tensor {name!r} has non-finite numbers; training diverged before this")
        return tensor.to(device=device, dtype=dtype)

    layers = []
    for index in range(shape.layers):
        layers.append(_layer(get, f"model.layers.{index}", shape))
        yield
    if shape.tied and not torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"]):
        raise WeightError("the config ties lm_head to the embedding, but the version has two different tensors")
    norm = _norm(get("model.norm.weight"))
    embedding = get("model.embed_tokens.weight").clone()
    yield
    # A tied head that is not packed shares the embedding's memory.
    head = Matrix(embedding, plain=embedding) if shape.tied else Matrix(get("lm_head.weight"))
    return ModelWeights(embedding=embedding, layers=tuple(layers), norm=norm, head=head)


def prepare_now(
    tensors: Mapping[str, torch.Tensor], shape: ModelShape, *, dtype: torch.dtype, device: torch.device
) -> ModelWeights:
    """Run `prepare` to completion."""
    steps = prepare(tensors, shape, dtype=dtype, device=device)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            made: ModelWeights = end.value
            return made


def _layer(get: Callable[[str], torch.Tensor], layer: str, shape: ModelShape) -> LayerWeights:
    attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"

    def paired(name: str, heads: int) -> torch.Tensor:
        """Interleave the two halves that rotary positions rotate together: a pair is one complex number."""
        tensor = get(name)
        rest = tensor.shape[1:]
        halves = tensor.view(heads, 2, shape.head_dim // 2, *rest)
        return halves.transpose(1, 2).reshape(heads * shape.head_dim, *rest)

    qkv = [paired(f"{attention}.q_proj.weight", shape.heads), paired(f"{attention}.k_proj.weight", shape.kv_heads)]
    qkv_bias = None
    if shape.qkv_bias:
        biases = [paired(f"{attention}.q_proj.bias", shape.heads), paired(f"{attention}.k_proj.bias", shape.kv_heads)]
        qkv_bias = torch.cat([*biases, get(f"{attention}.v_proj.bias")])
    qk_norm = None
    if shape.qk_norm:
        query, key = paired(f"{attention}.q_norm.weight", 1), paired(f"{attention}.k_norm.weight", 1)
        qk_norm = _norm(torch.stack([query] * shape.heads + [key] * shape.kv_heads))
    return LayerWeights(
        attention_norm=_norm(get(f"{layer}.input_layernorm.weight")),
        qkv=Matrix(torch.cat([*qkv, get(f"{attention}.v_proj.weight")])),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        output=Matrix(get(f"{attention}.o_proj.weight")),
        output_bias=get(f"{attention}.o_proj.bias") if shape.output_bias else None,
        mlp_norm=_norm(get(f"{layer}.post_attention_layernorm.weight")),
        gate_up=Matrix(torch.cat([get(f"{mlp}.gate_proj.weight"), get(f"{mlp}.up_proj.weight")])),
        down=Matrix(get(f"{mlp}.down_proj.weight")),
    )


def _norm(weight: torch.Tensor) -> torch.Tensor:
    return weight.float().mul(weight.shape[-1] ** 0.5)
