"""Adapter versions: low-rank factors A and B on a full version, and the merged weights W + B·A.

    <module>.lora_A.weight   (rank, inputs)
    <module>.lora_B.weight   (outputs, rank), including the scale of the adapter
    <module>.weight          in the full version that is the manifest's parent

Invariants: sums are computed in float32 and rounded once to the dtype of W; the full version is not modified, and
tensors that the adapter does not change are shared with it.
"""

from collections.abc import Generator, Mapping

import torch

from rollart.types.errors import WeightError

A, B = ".lora_A.weight", ".lora_B.weight"
Tensors = Mapping[str, torch.Tensor]


def merge(base: Tensors, factors: Tensors) -> Generator[None, None, dict[str, torch.Tensor]]:
    """Merge the weights, one changed tensor per step of the generator."""
    out = dict(base)
    modules = [name.removesuffix(A) for name in factors if name.endswith(A)]
    if len(factors) != 2 * len(modules) or any(module + B not in factors for module in modules):
        raise WeightError("an adapter has two factors for every module it changes; publish the version again")
    for module in modules:
        name = f"{module}.weight"
        narrow, wide = factors[module + A], factors[module + B]
        if name not in base or base[name].shape != (wide.shape[0], narrow.shape[1]) or wide.shape[1] != narrow.shape[0]:
            raise WeightError(
                f"the adapter's {module!r}, {tuple(wide.shape)} times {tuple(narrow.shape)}, does not fit its base. "
                "Give engine and trainer the same model."
            )
        weight = base[name]
        out[name] = torch.addmm(weight.float(), wide.float(), narrow.float()).to(weight.dtype)
        yield
    return out


def merge_now(base: Tensors, factors: Tensors) -> dict[str, torch.Tensor]:
    """Run `merge` to completion."""
    steps = merge(base, factors)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            made: dict[str, torch.Tensor] = end.value
            return made
