"""Muon: momentum with an orthogonalised update, for weight matrices (Jordan et al. 2024).

Every direction of an update gets the same size, so rare ones (such as copying a digit) are learned as fast as frequent
ones: a small model trained from scratch needs far fewer tokens than with AdamW alone.
"""

from collections.abc import Iterable

import torch

ITERATIONS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the polynomial that maps singular values in (0, 1] to near 1; the steepest at 0 that stays
bounded."""


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """(n, rows, columns): replace each matrix by approximately U·Vᵀ of its singular value decomposition U·S·Vᵀ."""
    tall = matrices.shape[1] > matrices.shape[2]
    x: torch.Tensor = matrices.mT if tall else matrices
    x = (x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)).to(_rough(matrices))
    linear, cubic, quintic = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = linear * x + (cubic * gram + quintic * gram @ gram) @ x
    return (x.mT if tall else x).to(matrices.dtype)


def _rough(matrices: torch.Tensor) -> torch.dtype:
    """bfloat16 where the hardware multiplies in it, since an approximation is enough; on such a CPU it halves
    the time."""
    native = matrices.is_cuda or torch.cpu.get_capabilities().get("avx512_bf16", False)
    return torch.bfloat16 if native else matrices.dtype


class Muon:
    """Steps matrices by `rate` along their orthogonalised momentum, scaled up for matrices with more rows
    than columns."""

    def __init__(self, matrices: Iterable[torch.nn.Parameter], momentum: float = 0.95) -> None:
        self._momentum = momentum
        self._groups: dict[torch.Size, list[torch.nn.Parameter]] = {}
        for matrix in matrices:
            self._groups.setdefault(matrix.shape, []).append(matrix)
        self._means = {shape: torch.zeros_like(torch.stack(tuple(group))) for shape, group in self._groups.items()}

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for shape, group in self._groups.items():
            gradients = torch.stack([_gradient(matrix) for matrix in group])
            mean = self._means[shape].lerp_(gradients, 1 - self._momentum)
            directions = orthogonal(gradients.lerp(mean, self._momentum))
            size = rate * max(1.0, shape[0] / shape[1]) ** 0.5
            for matrix, direction in zip(group, directions, strict=True):
                matrix.sub_(direction, alpha=size)


def _gradient(matrix: torch.nn.Parameter) -> torch.Tensor:
    return torch.zeros_like(matrix) if matrix.grad is None else matrix.grad
