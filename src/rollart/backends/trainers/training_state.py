"""A model, its optimiser and the random generators, as the files of a checkpoint and back.

What holds: bytes are those of the tensors, so training goes on as if it had never stopped; the folder is one that
`AutoModelForCausalLM.from_pretrained` loads as it is; all tensors are safetensors, so that loading runs no code.

    config.json             the model's configuration
    generation_config.json  and the tokenizer's files: as they were beside the model that training started from
    model.safetensors       its weights; tensors that share their memory are there once
    optimizer.safetensors   AdamW's state, `<parameter>/<field>`: exp_avg, exp_avg_sq, step
    random.safetensors      the default generators: cpu, and cuda where the model is there
    critic.safetensors      where there is one: the value head and its optimiser

A trainer that does not train the model itself has another `Layout` for the first and the third (`lora`).
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from rollart.backends.models import _RANDOM, ModelSetting
from rollart.backends.stores.tensors import verify_fit
from rollart.backends.trainers.checkpoint import TOKENIZER_FILES, Checkpoint
from rollart.backends.trainers.sharding import identity, part
from rollart.types.errors import RequestError, WeightError

CONFIG = "config.json"
MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
RANDOM = "random.safetensors"
GENERATION = "generation_config.json"
SOURCE_FILES = (GENERATION, *TOKENIZER_FILES)

_OF_OPTIMIZER = "optimizer/"

Tensors = Mapping[str, torch.Tensor]
Files = Iterator[tuple[str, bytes]]


class Layout(NamedTuple):
    """What of a model a checkpoint holds."""

    config: str
    described: bytes
    file: str
    tensors: Callable[[], Tensors]
    """Those of `file`, as they are trained; a rank gives its part of each."""


def whole_model(model: Any) -> Layout:
    return Layout(CONFIG, _config(model), MODEL, lambda: weights(model))


def source_files(setting: ModelSetting, model: Any) -> dict[str, bytes]:
    """What lies beside a model's weights and is the same in all its checkpoints. Read once: the folder may go."""
    if isinstance(setting, str):
        paths = [path for name in SOURCE_FILES if (path := Path(setting) / name).is_file()]
        found = {path.name: path.read_bytes() for path in paths}
    else:
        found = {}
    neutral: str = model.generation_config.to_json_string(use_diff=False)
    return {GENERATION: neutral.encode()} | found


def model_files(layout: Layout, source: Mapping[str, bytes], weights: Callable[[], Tensors]) -> Files:
    """The model alone; each file by its name, made when it is asked for: only one is in memory at a time.

    `weights` gives the tensors of the layout, whole.
    """
    yield layout.config, layout.described
    yield from source.items()
    yield layout.file, _packed(weights(), {"format": "pt"})  # the mark that transformers asks for


def files(
    layout: Layout,
    source: Mapping[str, bytes],
    device: torch.device,
    *,
    weights: Callable[[], Tensors],
    moments: Callable[[], Tensors],
) -> Files:
    """All of it, likewise; `moments` gives those of the optimiser."""
    yield from model_files(layout, source, weights)
    yield OPTIMIZER, _packed(moments())
    yield RANDOM, _packed(_random_state(device))


def restore(checkpoint: Checkpoint, layout: Layout, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Make these what they were. Hyper-parameters are those of the settings, which may have been changed since."""
    saved, own = _read(checkpoint.file(layout.file)), layout.tensors()
    try:
        verify_fit(saved, own, checkpoint.version)
    except WeightError as error:
        raise RequestError(
            f"checkpoint {checkpoint.folder} is not of this model: {error} "
            "Give the trainer the model of the checkpoint, or another folder for checkpoints."
        ) from error
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(part(saved[name], like=tensor))
    _unflatten(_read(checkpoint.file(OPTIMIZER)), checkpoint.folder, model, optimizer)
    _set_random_state(_read(checkpoint.file(RANDOM)), model.device)


def module_state(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> bytes:
    """A module that is trained beside the model and its optimiser, as one file."""
    return _packed({**module.state_dict(), **{_OF_OPTIMIZER + key: v for key, v in moments(module, optimizer).items()}})


def restore_module(path: Path, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Make these what they were."""
    saved = _read(path)
    flat = {key.removeprefix(_OF_OPTIMIZER): saved.pop(key) for key in list(saved) if key.startswith(_OF_OPTIMIZER)}
    try:
        module.load_state_dict(saved)
    except RuntimeError as error:
        raise RequestError(f"{path} is not of this model: {error}. Give another folder for checkpoints.") from error
    _unflatten(flat, path.parent, module, optimizer)


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
    config.dtype = model.dtype
    text: str = config.to_json_string()
    return text.encode()


def weights(model: Any) -> dict[str, torch.Tensor]:
    """The state dict, with every piece of memory under the first of its names."""
    seen: set[object] = set()
    kept = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        memory = identity(tensor)
        if tensor.numel() and memory in seen:
            continue
        seen.add(memory)
        kept[name] = tensor
    return kept


def moments(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The optimiser's state, flat."""
    state = optimizer.state
    return {
        f"{name}/{field}": value
        for name, parameter in model.named_parameters()
        if parameter in state
        for field, value in state[parameter].items()
    }


def _unflatten(flat: Tensors, folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> None:
    parameters = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    index = {name: number for number, (name, _) in enumerate(parameters)}
    state: dict[int, dict[str, torch.Tensor]] = {}
    for key, value in flat.items():
        name, _, field = key.rpartition("/")
        if name not in index:
            raise RequestError(f"checkpoint {folder} has optimiser state of {name!r}, which this model does not have")
        parameter = parameters[index[name]][1]
        scalar = not value.dim()  # the number of steps is not cut over ranks
        state.setdefault(index[name], {})[field] = value if scalar else part(value, like=parameter)
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
