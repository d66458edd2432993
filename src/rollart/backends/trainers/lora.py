"""LoRA through PEFT: the model is frozen, and low-rank factors beside its linear layers are trained.

    h = W·x + (alpha / rank) · B·A·x          A random, B zero: training starts at the model itself

Invariants:
- Only the factors have gradients, optimiser state and a place in checkpoints.
- A checkpoint is a PEFT folder: `PeftModel.from_pretrained(model, folder)` loads it onto the model that training
  started from. It holds only a fingerprint of that model; resuming on a different one is refused.
- The first version a trainer publishes is full, with the current factors merged; later ones are adapters on it
  (`stores.adapters`), or full versions if `publish` is "merged", for engines that accept nothing else. Either way an
  engine ends up with the same weights.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rollart.backends.models import ModelSetting, build_model, seeded
from rollart.backends.stores.adapters import A, B, Tensors, merge_now
from rollart.backends.trainers.sharding import whole
from rollart.backends.trainers.training_state import Layout, write_model
from rollart.config.training import LoraSettings
from rollart.types.errors import RequestError

CONFIG = "adapter_config.json"
FACTORS = "adapter_model.safetensors"
NAME = "default"
PREFIX = "base_model.model."
"""Prefix of names in PEFT's files."""


class Adapter:
    """LoRA factors, attached to a model. The model may be sharded over ranks afterwards."""

    def __init__(self, model: Any, settings: LoraSettings, *, source: ModelSetting, seed: int) -> None:
        """`seed` initialises the factors and must be the same on all ranks."""
        self._model = model
        self.fingerprint = _fingerprint(model)
        self._config = _attach(model, settings, seed)
        self._config.base_model_name_or_path = source if isinstance(source, str) else None
        self._modules = {name: module for name, module in model.named_modules() if hasattr(module, "base_layer")}
        head = model.get_output_embeddings()
        for name, module in self._modules.items():
            if module is head or not isinstance(module.base_layer, torch.nn.Linear):
                raise RequestError(f"{name!r} cannot have LoRA factors; only linear layers before the output head can")
        self._scale = settings.alpha / settings.rank
        self._first: Tensors = {}
        """Factors merged into the full version that adapters are published on."""

    def base(self) -> dict[str, torch.Tensor]:
        """The frozen weights, under the names of the model without factors; possibly one rank's shard of them."""
        return {
            name.replace(".base_layer.", "."): tensor
            for name, tensor in self._model.state_dict(keep_vars=True).items()
            if f".{NAME}." not in name
        }

    def factors(self) -> dict[str, torch.Tensor]:
        """A copy of the full factors, with the scale folded into B. A collective: all ranks must call it."""
        out = {}
        for name, module in self._modules.items():
            out[name + A] = whole(module.lora_A[NAME].weight).cpu().clone()
            out[name + B] = self._scale * whole(module.lora_B[NAME].weight).cpu()
        return out

    def full_version(self, base: Tensors, factors: Tensors) -> Tensors:
        """All weights; later adapters are relative to these."""
        self._keep_first(factors)
        return merge_now(base, factors)

    def full_shards(self, base: Tensors, factors: Tensors, rows: Mapping[str, range]) -> Tensors:
        """As `full_version`, of one rank's rows of the weights."""
        own = {}
        for name in factors:
            weight = f"{name.removesuffix(A).removesuffix(B)}.weight"
            if weight in base:
                own[name] = factors[name][list(rows[weight])] if name.endswith(B) else factors[name]
        self._keep_first(factors)
        return merge_now(base, own)

    def adapter_version(self, factors: Tensors) -> Tensors:
        """Change since the last full version: B·A − B₀·A₀, which is again a product of factors."""
        out = dict(factors)
        for name, first in self._first.items():
            out[name] = torch.cat((out[name], first)) if name.endswith(A) else torch.cat((out[name], -first), 1)
        return out

    def _keep_first(self, factors: Tensors) -> None:
        self._first = factors if any(factors[name].any() for name in factors if name.endswith(B)) else {}

    def layout(self) -> Layout:
        """Files as PEFT saves them."""
        described = {key: _plain(value) for key, value in self._config.to_dict().items()}
        return Layout(CONFIG, json.dumps(described, indent=2, sort_keys=True).encode(), FACTORS, self._to_save)

    def _to_save(self) -> dict[str, torch.Tensor]:
        out = {}
        for name, module in self._modules.items():
            out[PREFIX + name + A] = module.lora_A[NAME].weight
            out[PREFIX + name + B] = module.lora_B[NAME].weight
        return out


def write_merged(folder: Path, model: ModelSetting, adapter: Path, seed: int = 0) -> None:
    """The model with the factors of a checkpoint merged into its weights, as a folder for `from_pretrained`."""
    peft = _peft()
    built = build_model(model, dtype="float32", device="cpu", seed=seed)
    merged = peft.PeftModel.from_pretrained(built, adapter).merge_and_unload()
    write_model(folder, model, merged)


def _peft() -> Any:
    try:
        import peft
    except ModuleNotFoundError as error:
        raise RequestError(f"LoRA needs {error.name}, which is not installed: pip install 'rollart[lora]'") from error
    return peft


def _attach(model: Any, settings: LoraSettings, seed: int) -> Any:
    peft = _peft()
    targets = settings.target_modules
    config = peft.LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=targets if isinstance(targets, str) else list(targets),
        task_type="CAUSAL_LM",
    )
    try:
        with seeded(seed, model.device):
            peft.inject_adapter_in_model(config, model, adapter_name=NAME)
    except ValueError as error:
        raise RequestError(f"target_modules {targets!r} of LoRA: {error}") from error
    model.eval()
    return config


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set) else value


def _fingerprint(model: Any) -> str:
    """Digest of about a thousand values per tensor: a cheap check that detects a different model or training state."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in model.state_dict().items():
        some = tensor.flatten()[:: 1 + tensor.numel() // 1000].contiguous().cpu()
        digest.update(f"{name} {tuple(tensor.shape)}".encode() + some.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
