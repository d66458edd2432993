"""Causal language models for the reference backends: from a folder or from a config, never from the network.

What holds: engine and trainer built from the same `model` setting have the same tensors by name and shape; a model
built from a config and a seed has the same weights in every process; log-probabilities of both sides are computed by
`token_logprobs`, so that they can be compared.
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
"""A folder with a checkpoint in safetensors, or `{"config": {"model_type": "qwen3", …}}` for random weights."""

_RANDOM = threading.Lock()
"""torch has one default generator per process; who seeds it must be alone with it."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Of glibc's <malloc.h>."""


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Run with the default generators seeded, and leave them as they were. Threads take turns."""
    devices = [device] if device.type == "cuda" else []
    with _RANDOM, torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


def build_model(model: ModelSetting, *, dtype: str, device: str, seed: int = 0) -> Any:
    """A model in evaluation mode: without dropout, sampling and training see the same function of the weights."""
    # Per thread, and workers are built in theirs. More threads collapse as soon as two workers share the machine.
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
    # A checkpoint's own sampling defaults (top-k, penalties) would change the distribution that is sampled from.
    built.generation_config = GenerationConfig()
    built.config.architectures = [type(built).__name__]  # also where the class gets another name, cut over ranks
    return built.to(target).eval()


def keep_freed_memory() -> None:
    """Have the C library keep what a step frees for the next one.

    Otherwise glibc gives it back and every step takes it again, page by page: thousands of faults, some percent of the
    time of a small model. Other libraries have no such setting, and nothing happens.
    """
    setting = getattr(ctypes.CDLL(None), "mallopt", None)
    if setting is not None:
        setting(_M_TRIM_THRESHOLD, 2**31 - 1)
        setting(_M_MMAP_THRESHOLD, 32 * 2**20)  # the largest that is taken


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
    """Temperature-scaled full-softmax log-probability of each token; at temperature 0 (greedy) that of temperature 1.

    `logits`: (n, vocabulary), the row before each token. `tokens`: (n,). Computed in float32.
    """
    scaled = logits.float() / (temperature or 1.0)
    return torch.log_softmax(scaled, dim=-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def _from_folder(folder: str, dtype: torch.dtype) -> Any:
    if not (Path(folder) / "config.json").is_file():
        raise RequestError(f"model {folder!r} is no folder with a config.json; give a local checkpoint or a config")
    transformers_logging.disable_progress_bar()  # a worker has no terminal of its own
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True, use_safetensors=True)


def _from_config(model: Mapping[str, Any], dtype: torch.dtype) -> Any:
    if set(model) != {"config"}:
        raise RequestError(f"a model is a folder or {{'config': {{…}}}}, but its keys are {sorted(model)}")
    options = dict(model["config"])
    model_type = options.pop("model_type", "qwen3")
    try:
        config = AutoConfig.for_model(model_type, **options)
    except ValueError as error:
        raise RequestError(f"model_type {model_type!r} with {options}: {error}") from error
    return AutoModelForCausalLM.from_config(config, dtype=dtype)
