"""A model cut over several ranks: every tensor in equal parts, put together layer by layer while it is computed with.

What holds:
- gradients are added over the ranks, never averaged: what a loss divides by is that of the whole batch already;
- parameters, gradients and the optimiser's state are float32. Layers are put together in the type they are computed
  in, what is around them in float32, so that numbers between layers are float32 as they are in one process;
- names and shapes are those of one process: checkpoints and published versions do not tell how many ranks there were;
- tensors of one process pass through `whole`, `parts` and `identity` as they are.

Everything here is for all ranks at once: one that is not called while the others are leaves them waiting.
"""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers.modeling_layers import GradientCheckpointingLayer

from rollart.algo.metrics import Metrics
from rollart.backends.stores.tensors import memory_of

T = TypeVar("T")


def shard(model: Any, mesh: DeviceMesh, compute: torch.dtype) -> None:
    """Leave this rank its part of a model that all ranks have built alike."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    in_layers = MixedPrecisionPolicy() if compute == torch.float32 else _computed_in(compute)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=in_layers)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # A plain sum. Without the second, gloo would be asked for an operation that only NCCL has.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor, detached."""
    detached = tensor.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached


def part(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Of a whole tensor, what this rank holds if it is cut as `like`."""
    if not isinstance(like, DTensor):
        return tensor
    # Every rank has the whole, so nothing is sent.
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def identity(tensor: torch.Tensor) -> object:
    """Equal for tensors that are one in memory. A part may be empty, and then only the object can tell."""
    return id(tensor) if isinstance(tensor, DTensor) else memory_of(tensor)


def clip(parameters: Iterable[torch.Tensor], largest: float) -> float:
    """Scale the gradients down to this norm, over all ranks; gives the norm they had."""
    own = [parameter for parameter in parameters if parameter.grad is not None]
    norm = whole(get_total_norm([parameter.grad for parameter in own if parameter.grad is not None]))
    clip_grads_with_norm_(own, largest, norm)
    return float(norm)


def over_ranks(metrics: Metrics) -> Metrics:
    """Those of all ranks together, to the last bit the same on each of them: they decide by it alike."""
    own = ({name: float(value) for name, value in each.items()} for each in (metrics.sums, metrics.maxima))
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, tuple(own))
    total = Metrics()
    for sums, maxima in told:
        total = total + Metrics(_tensors(sums), _tensors(maxima))
    return total


def gathered(found: Mapping[int, T]) -> dict[int, T]:
    """What all ranks have found, each something else."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, dict(found))
    return {key: value for each in told for key, value in each.items()}


def add_up(tensors: Iterable[torch.Tensor]) -> None:
    """Make each the sum over the ranks."""
    for tensor in tensors:
        dist.all_reduce(tensor)


def _tensors(values: Mapping[str, float]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}


def _computed_in(dtype: torch.dtype) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
