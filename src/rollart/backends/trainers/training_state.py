"""A model, its optimiser and the random generators, as the files of a checkpoint and back.

What holds: bytes are those of the tensors, so training goes on as if it had never stopped; the folder is one that
`AutoModelForCausalLM.from_pretrained` loads as it is; all tensors are safetensors, so that loading runs no code.

    config.json             the model's configuration
    generation_config.json  and the tokenizer's files: as they were beside the model that training started from
    model.safetensors       its weights; tensors that share their memory are there once
    optimizer.safetensors   AdamW's state, `<parameter>/<field>`: exp_avg, exp_avg_sq, step
    random.safetensors      the default generators: cpu, and cuda where the model is there
"""

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from rollart.backends.models import _RANDOM, ModelSetting
from rollart.backends.stores.tensors import memory_of, verify_fit
from rollart.backends.trainers.checkpoint import TOKENIZER_FILES, Checkpoint
from rollart.types.errors import RequestError, WeightError

CONFIG = "config.json"
MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
RANDOM = "random.safetensors"
GENERATION = "generation_config.json"
SOURCE_FILES = (GENERATION, *TOKENIZER_FILES)

Tensors = Mapping[str, torch.Tensor]


def source_files(setting: ModelSetting, model: Any) -> dict[str, bytes]:
    """What lies beside a model's weights and is the same in all its checkpoints. Read once: the folder may go."""
    if isinstance(setting, str):
        paths = [path for name in SOURCE_FILES if (path := Path(setting) / name).is_file()]
        found = {path.name: path.read_bytes() for path in paths}
    else:
        found = {}
    neutral: str = model.generation_config.to_json_string(use_diff=False)
    return {GENERATION: neutral.encode()} | found


def model_files(model: Any, source: Mapping[str, bytes]) -> Iterator[tuple[str, bytes]]:
    """The model alone; each file by its name, made when it is asked for: only one is in memory at a time."""
    yield CONFIG, _config(model)
    yield from source.items()
    yield MODEL, _packed(_weights(model), {"format": "pt"})  # the mark that transformers asks for


def files(model: Any, optimizer: torch.optim.Optimizer, source: Mapping[str, bytes]) -> Iterator[tuple[str, bytes]]:
    """All of it, likewise."""
    yield from model_files(model, source)
    yield OPTIMIZER, _packed(_flat(model, optimizer))
    yield RANDOM, _packed(_random_state(model.device))


def restore(checkpoint: Checkpoint, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Make these what they were. Hyper-parameters are those of the settings, which may have been changed since."""
    saved, own = _read(checkpoint.file(MODEL)), _weights(model)
    try:
        verify_fit(saved, own, checkpoint.version)
    except WeightError as error:
        raise RequestError(
            f"checkpoint {checkpoint.folder} is not of this model: {error} "
            "Give the trainer the model of the checkpoint, or another folder for checkpoints."
        ) from error
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(saved[name])
    _unflatten(_read(checkpoint.file(OPTIMIZER)), checkpoint.folder, model, optimizer)
    _set_random_state(_read(checkpoint.file(RANDOM)), model.device)


def _packed(tensors: Tensors, metadata: dict[str, str] | None = None) -> bytes:
    data: bytes = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, metadata)
    return data


def _read(path: Path) -> dict[str, torch.Tensor]:
    try:
        # A copy of its own for each tensor: the optimiser writes in place, and the file goes when its time has come.
        return {name: tensor.clone() for name, tensor in load_file(path).items()}
    except SafetensorError as error:
        raise RequestError(
            f"{path} is not safetensors ({error}), and nothing else is read; remove the folder"
        ) from error


def _config(model: Any) -> bytes:
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = model.dtype
    text: str = config.to_json_string()
    return text.encode()


def _weights(model: Any) -> dict[str, torch.Tensor]:
    """The state dict, with every piece of memory under the first of its names."""
    seen: set[tuple[object, ...]] = set()
    kept = {}
    for name, tensor in model.state_dict().items():
        identity = memory_of(tensor)
        if tensor.numel() and identity in seen:
            continue
        seen.add(identity)
        kept[name] = tensor
    return kept


def _flat(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    state = optimizer.state
    return {
        f"{name}/{field}": value
        for name, parameter in model.named_parameters()
        if parameter in state
        for field, value in state[parameter].items()
    }


def _unflatten(flat: Tensors, folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> None:
    index = {name: number for number, (name, _) in enumerate(model.named_parameters())}
    state: dict[int, dict[str, torch.Tensor]] = {}
    for key, value in flat.items():
        name, _, field = key.rpartition("/")
        if name not in index:
            raise RequestError(f"checkpoint {folder} has optimiser state of {name!r}, which this model does not have")
        state.setdefault(index[name], {})[field] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


# Whoever reads or sets the default generators must be alone with them, hence the lock of `models`.
def _random_state(device: torch.device) -> dict[str, torch.Tensor]:
    with _RANDOM:
        state = {"cpu": torch.get_rng_state()}
        if device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(device)
        return state


def _set_random_state(state: Tensors, device: torch.device) -> None:
    with _RANDOM:
        torch.set_rng_state(state["cpu"])
        if device.type == "cuda" and "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"], device)
