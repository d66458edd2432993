"""The weights of a checkpoint folder: safetensors, in one file or in shards with an index."""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from rollart.backends.engines.checkpoint_config import ModelShape
from rollart.types.errors import RequestError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def load_tensors(folder: Path, shape: ModelShape) -> dict[str, torch.Tensor]:
    """Exactly the tensors of the shape; a tied head, which checkpoints leave out, is the embedding."""
    tensors: dict[str, torch.Tensor] = {}
    for name in _files(folder):
        try:
            tensors |= load_file(folder / name)
        except (OSError, SafetensorError) as error:
            raise RequestError(f"{folder / name} cannot be read ({error}); download the checkpoint again") from error
    if shape.tied:
        tensors.setdefault("lm_head.weight", tensors.get("model.embed_tokens.weight", torch.empty(0)))
    wanted = shape.tensors()
    wrong = [name for name in wanted if name not in tensors or tuple(tensors[name].shape) != wanted[name]]
    if wrong:
        raise RequestError(f"the checkpoint in {str(folder)!r} does not have the {wrong[:3]} of its config.json")
    return {name: tensors[name] for name in wanted}


def _files(folder: Path) -> list[str]:
    if (folder / _SINGLE).is_file():
        return [_SINGLE]
    if (folder / _INDEX).is_file():
        index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
        return sorted(set(index["weight_map"].values()))
    raise RequestError(f"{str(folder)!r} holds neither {_SINGLE} nor {_INDEX}; other formats are not read")
