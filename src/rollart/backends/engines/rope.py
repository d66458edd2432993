"""Rotary positions as a table of complex numbers: rotating a pair of dimensions is one complex product."""

import math
from collections.abc import Mapping

import torch

from rollart.backends.engines.checkpoint_config import ModelShape, RopeShape
from rollart.types.errors import RequestError


def rotations(shape: ModelShape, length: int, device: torch.device) -> torch.Tensor:
    """Factors for each position below `length`: complex64, (length, head_dim / 2)."""
    rope = shape.rope
    if rope.kind == "dynamic" and length > shape.positions:
        raise RequestError(
            f"rope type 'dynamic' rotates every position anew once a context exceeds {shape.positions} tokens, which "
            f"invalidates cached keys; set max_context to at most {shape.positions}, or use rope type 'yarn'"
        )
    frequencies, scale = _frequencies(rope, shape.head_dim)
    angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies[None, :]
    return torch.polar(torch.full_like(angles, scale), angles).to(device)


def _frequencies(rope: RopeShape, dim: int) -> tuple[torch.Tensor, float]:
    """Frequency of each pair of dimensions, and the scale of the factors."""
    plain = 1.0 / (rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if rope.kind == "linear":
        return plain / rope.options["factor"], 1.0
    if rope.kind == "llama3":
        return _llama3(plain, rope.options, rope.original_positions), 1.0
    if rope.kind == "yarn":
        return _yarn(plain, rope, dim)
    return plain, 1.0


def _llama3(plain: torch.Tensor, options: Mapping[str, float], original: int) -> torch.Tensor:
    """Stretch long wavelengths by `factor`, keep short ones, and blend between."""
    factor, low, high = options["factor"], options["low_freq_factor"], options["high_freq_factor"]
    waves_per_context = original * plain / (2 * math.pi)
    blend = ((waves_per_context - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * plain / factor + blend * plain


def _yarn(plain: torch.Tensor, rope: RopeShape, dim: int) -> tuple[torch.Tensor, float]:
    """Keep high frequencies, stretch low ones, with a ramp between them."""
    options = rope.options
    factor = options["factor"]

    def dimension(turns: float) -> float:
        return dim * math.log(rope.original_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(options.get("beta_fast") or 32.0), dimension(options.get("beta_slow") or 1.0)
    if options.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
    return plain / factor * ramp + plain * (1 - ramp), _yarn_scale(options)


def _yarn_scale(options: Mapping[str, float]) -> float:
    given = options.get("attention_factor")
    if given is not None:
        return given

    def scale(weight: float) -> float:
        return 1.0 if options["factor"] <= 1 else 0.1 * weight * math.log(options["factor"]) + 1.0

    if options.get("mscale") and options.get("mscale_all_dim"):
        return scale(options["mscale"]) / scale(options["mscale_all_dim"])
    return scale(1.0)
