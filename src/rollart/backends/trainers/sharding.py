"""FSDP2 sharding of a model: every tensor is split evenly over ranks and gathered layer by layer.

Invariants:
- Gradients are summed over ranks, never averaged: the loss is already divided by totals of the whole batch.
- Parameters, gradients and optimiser state are float32. Layers are gathered in the compute dtype and everything around
  them in float32, so activations between layers are float32, as in a single process.
- Names and shapes are those of a single process: checkpoints and published versions are independent of the number of
  ranks.
- In a single process, `whole`, `part` and `identity` pass tensors through unchanged.

All functions here are collective: if one rank does not call them, the others block.
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
    """Shard a model that all ranks have built identically, keeping only this rank's part."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    in_layers = MixedPrecisionPolicy() if compute == torch.float32 else _computed_in(compute)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=in_layers)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # A plain sum. Without the second call, FSDP would use a reduction that only NCCL has, not gloo.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor, detached."""
    detached = tensor.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached


def own_rows(tensor: torch.Tensor) -> range:
    """The rows of a full tensor that this rank answers for; rank 0 for all of one that is not sharded."""
    rows = range(tensor.shape[0] if tensor.dim() else 1)
    if not isinstance(tensor, DTensor):
        return rows if dist.get_rank() == 0 else range(0)
    size = -(-len(rows) // tensor.device_mesh.size())  # as `torch.chunk` divides them
    return rows[size * tensor.device_mesh.get_local_rank() :][:size]


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard, detached: the rows of `own_rows`."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def part(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a full tensor, sharded like `like`."""
    if not isinstance(like, DTensor):
        return tensor
    # Every rank has the full tensor, so no data is sent.
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def identity(tensor: torch.Tensor) -> object:
    """Equal for tensors that share memory. A shard may be empty, and then only object identity can tell."""
    return id(tensor) if isinstance(tensor, DTensor) else memory_of(tensor)


def clip(parameters: Iterable[torch.Tensor], largest: float) -> float:
    """Clip gradients to this total norm over all ranks; returns the norm before clipping."""
    own = [parameter for parameter in parameters if parameter.grad is not None]
    norm = whole(get_total_norm([parameter.grad for parameter in own if parameter.grad is not None]))
    clip_grads_with_norm_(own, largest, norm)
    return float(norm)


def over_ranks(metrics: Metrics, ranks: int) -> Metrics:
    """Metrics summed over all ranks, bitwise identical on each, so that all make the same decisions."""
    if ranks == 1:
        return metrics
    own = ({name: float(value) for name, value in each.items()} for each in (metrics.sums, metrics.maxima))
    total = Metrics()
    for sums, maxima in of_each_rank(tuple(own), ranks):
        total = total + Metrics(_tensors(sums), _tensors(maxima))
    return total


def of_each_rank(own: T, ranks: int) -> list[T]:
    """This value of every rank, in their order; small ones only."""
    if ranks == 1:
        return [own]
    by_rank: list[Any] = [None] * ranks
    dist.all_gather_object(by_rank, own)
    return by_rank


def from_rank_0(tensors: Mapping[str, torch.Tensor], ranks: int) -> Mapping[str, torch.Tensor]:
    """The tensors of rank 0, on every rank, in memory of its own."""
    if ranks == 1:
        return tensors
    header: list[Any] = [[(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]]
    dist.broadcast_object_list(header, src=0)
    device = "cuda" if dist.get_backend() == dist.Backend.NCCL else "cpu"
    received = {}
    for name, shape, dtype in header[0]:
        tensor = tensors[name].to(device) if name in tensors else torch.empty(shape, dtype=dtype, device=device)
        dist.broadcast(tensor, src=0)
        received[name] = tensor.cpu()
    return received


def add_up(tensors: Iterable[torch.Tensor]) -> None:
    """All-reduce each tensor, in place."""
    for tensor in tensors:
        dist.all_reduce(tensor)


def _tensors(values: Mapping[str, float]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}


def _computed_in(dtype: torch.dtype) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
