"""Causal language models for torch backends: from a folder or from a config, never from the network.

Invariants: an engine and a trainer built from the same `model` setting have the same tensors by name and shape; a model
built from a config and a seed has the same weights in every process; both sides compute log-probabilities with
`token_logprobs`, so they are comparable.
"""

import ctypes
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging as transformers_logging

from rollart.types.errors import RequestError

ModelSetting = str | Mapping[str, Any]
"""A folder with a safetensors checkpoint, or `{"config": {"model_type": "qwen3", …}}` for random weights."""

_RANDOM = threading.Lock()
"""Guards torch's default generator, of which there is one per process."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""From glibc's <malloc.h>."""


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Run with seeded default generators and restore their state afterwards. Threads take turns."""
    devices = [device] if device.type == "cuda" else []
    with _RANDOM, torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


def build_model(model: ModelSetting, *, dtype: str, device: str, seed: int = 0) -> Any:
    """A model in evaluation mode: without dropout, sampling and training see the same function of the weights."""
    # A per-thread setting, and workers are built in their own threads. More threads thrash once two workers share a
    # machine.
    torch.set_num_threads(1)
    target = torch.device(device)
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise RequestError(f"dtype {dtype!r} is unknown; use float32 or bfloat16")
    if isinstance(model, str):
        built = _from_folder(model, kind)
    else:
        with seeded(seed, target):
            built = _from_config(model, kind)
    # A checkpoint's own sampling defaults (top-k, penalties) would change the sampled distribution.
    built.generation_config = GenerationConfig()
    built.config.architectures = [type(built).__name__]  # FSDP renames the class, so record it here
    return built.to(target).eval()


def keep_freed_memory() -> None:
    """Make the C library keep memory freed by one step for the next.

    By default glibc returns it to the kernel and every step faults it in again, page by page: thousands of faults, a
    few percent of a small model's time. A no-op with other C libraries.
    """
    setting = getattr(ctypes.CDLL(None), "mallopt", None)
    if setting is not None:
        setting(_M_TRIM_THRESHOLD, 2**31 - 1)
        setting(_M_MMAP_THRESHOLD, 32 * 2**20)  # the largest accepted value


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
    """Temperature-scaled full-softmax log-probability of each token; temperature 0 (greedy) is treated as 1.

    `logits`: (n, vocabulary), the row that predicts each token. `tokens`: (n,). Computed in float32.
    """
    scaled = logits.float() / (temperature or 1.0)
    return torch.log_softmax(scaled, dim=-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def _from_folder(folder: str, dtype: torch.dtype) -> Any:
    if not (Path(folder) / "config.json").is_file():
        raise RequestError(f"model {folder!r} is not a folder with a config.json; give a local checkpoint or a config")
    transformers_logging.disable_progress_bar()  # a worker has no terminal
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True, use_safetensors=True)


def _from_config(model: Mapping[str, Any], dtype: torch.dtype) -> Any:
    if set(model) != {"config"}:
        raise RequestError(f"a model is a folder or {{'config': {{…}}}}; got keys {sorted(model)}")
    options = dict(model["config"])
    model_type = options.pop("model_type", "qwen3")
    try:
        config = AutoConfig.for_model(model_type, **options)
    except ValueError as error:
        raise RequestError(f"model_type {model_type!r} with {options}: {error}") from error
    return AutoModelForCausalLM.from_config(config, dtype=dtype)
