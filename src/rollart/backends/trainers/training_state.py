"""Serialisation of a model, its optimiser and the random generators to the files of a checkpoint and back.

Invariants: tensors round-trip byte for byte, so training resumes as if it had never stopped; the folder loads with
`AutoModelForCausalLM.from_pretrained` as it is; all tensors are safetensors, so loading runs no code.

    config.json             the model's configuration
    generation_config.json  and the tokenizer's files: copied from the model that training started from
    model.safetensors       its weights; tensors that share memory are stored once
    optimizer.safetensors   AdamW's state, `<parameter>/<field>`: exp_avg, exp_avg_sq, step
    random.safetensors      the default generators: cpu, and cuda if the model is there
    critic.safetensors      with a critic: the value head and its optimiser

A trainer that does not train the model itself uses a different `Layout` for the first and third (`lora`).
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
from rollart.backends.trainers.checkpoint import TOKENIZER_FILES, Checkpoint, write_folder
from rollart.backends.trainers.sharding import from_rank_0, identity, of_each_rank, part
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
    """The part of a model that a checkpoint holds."""

    config: str
    described: bytes
    file: str
    tensors: Callable[[], Tensors]
    """Tensors of `file`, as trained; each rank returns its shard of each."""


def whole_model(model: Any) -> Layout:
    return Layout(CONFIG, _config(model), MODEL, lambda: weights(model))


def source_files(setting: ModelSetting, model: Any) -> dict[str, bytes]:
    """Files beside a model's weights that are the same in all its checkpoints. Read once, as the folder may
    be removed."""
    if isinstance(setting, str):
        paths = [path for name in SOURCE_FILES if (path := Path(setting) / name).is_file()]
        found = {path.name: path.read_bytes() for path in paths}
    else:
        found = {}
    neutral: str = model.generation_config.to_json_string(use_diff=False)
    return {GENERATION: neutral.encode()} | found


def model_files(layout: Layout, source: Mapping[str, bytes], weights: Callable[[], Tensors]) -> Files:
    """Files of the model alone, generated lazily: only one is in memory at a time.

    `weights` returns the full tensors of the layout.
    """
    yield layout.config, layout.described
    yield from source.items()
    yield layout.file, _packed(weights(), {"format": "pt"})  # transformers requires this marker


def write_model(folder: Path, setting: ModelSetting, model: Any) -> None:
    """A folder that `AutoModelForCausalLM.from_pretrained` loads, with the files beside the model it was built from."""
    layout = whole_model(model)
    write_folder(folder, model_files(layout, source_files(setting, model), layout.tensors))


def files(
    layout: Layout,
    source: Mapping[str, bytes],
    device: torch.device,
    *,
    weights: Callable[[], Tensors],
    moments: Callable[[], Tensors],
) -> Files:
    """All files of a checkpoint, generated lazily; `moments` returns the optimiser's state."""
    yield from model_files(layout, source, weights)
    yield OPTIMIZER, _packed(moments())
    yield RANDOM, _packed(_random_state(device))


def restore(
    checkpoint: Checkpoint,
    layout: Layout,
    model: Any,
    optimizer: torch.optim.Optimizer,
    *,
    ranks: int = 1,
    rank: int = 0,
) -> None:
    """Restore model, optimiser and generators. Hyper-parameters come from the settings, which may have
    changed since. Only rank 0 reads the files, which may be on its machine alone."""
    saved, own = _read(checkpoint.file(layout.file), ranks, rank), layout.tensors()
    try:
        verify_fit(saved, own, checkpoint.version)
    except WeightError as error:
        raise RequestError(
            f"checkpoint {checkpoint.folder} does not fit this model: {error} "
            "Give the trainer the checkpoint's model, or another folder for checkpoints."
        ) from error
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(part(saved[name], like=tensor))
    _unflatten(_read(checkpoint.file(OPTIMIZER), ranks, rank), checkpoint.folder, model, optimizer)
    _set_random_state(_read(checkpoint.file(RANDOM), ranks, rank), model.device)


def module_state(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> bytes:
    """A module trained beside the model, with its optimiser, as one file."""
    return _packed({**module.state_dict(), **{_OF_OPTIMIZER + key: v for key, v in moments(module, optimizer).items()}})


def restore_module(
    path: Path, module: torch.nn.Module, optimizer: torch.optim.Optimizer, *, ranks: int = 1, rank: int = 0
) -> None:
    """Restore a module and its optimiser."""
    saved = dict(_read(path, ranks, rank))
    flat = {key.removeprefix(_OF_OPTIMIZER): saved.pop(key) for key in list(saved) if key.startswith(_OF_OPTIMIZER)}
    try:
        module.load_state_dict(saved)
    except RuntimeError as error:
        raise RequestError(f"{path} does not fit this model: {error}. Use another folder for checkpoints.") from error
    _unflatten(flat, path.parent, module, optimizer)


def _packed(tensors: Tensors, metadata: dict[str, str] | None = None) -> bytes:
    data: bytes = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, metadata)
    return data


def _read(path: Path, ranks: int, rank: int) -> Tensors:
    """The tensors of a file, which rank 0 reads. An error of rank 0 is raised by all ranks."""
    tensors, problem = ({}, "") if rank else _load(path)
    problem = of_each_rank(problem, ranks)[0]
    if problem:
        raise RequestError(problem)
    return from_rank_0(tensors, ranks)


def _load(path: Path) -> tuple[dict[str, torch.Tensor], str]:
    try:
        # Clone each tensor: the optimiser writes in place, and the file may be pruned later.
        return {name: tensor.clone() for name, tensor in load_file(path).items()}, ""
    except SafetensorError as error:
        return {}, f"{path} is not safetensors ({error}), and no other format is read; remove the folder"


def _config(model: Any) -> bytes:
    config = copy.deepcopy(model.config)
    config.dtype = model.dtype
    text: str = config.to_json_string()
    return text.encode()


def weights(model: Any) -> dict[str, torch.Tensor]:
    """The state dict, with shared memory only under its first name."""
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
    """The optimiser's state, flattened."""
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
            raise RequestError(f"checkpoint {folder} has optimiser state for {name!r}, which this model lacks")
        parameter = parameters[index[name]][1]
        scalar = not value.dim()  # the step count is not sharded
        state.setdefault(index[name], {})[field] = value if scalar else part(value, like=parameter)
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


# The default generators are global, hence the lock of `models` around every access.
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
