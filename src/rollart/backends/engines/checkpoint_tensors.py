"""The weights of a checkpoint folder: safetensors, in one file or in shards with an index."""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from rollart.backends.engines.checkpoint_config import ModelShape
from rollart.backends.engines.checkpoint_header import check_shapes, unreadable, weight_files


def load_tensors(folder: Path, shape: ModelShape) -> dict[str, torch.Tensor]:
    """Load exactly the tensors of the shape; a tied head, which checkpoints leave out, is the embedding."""
    tensors: dict[str, torch.Tensor] = {}
    for name in weight_files(folder):
        try:
            tensors |= load_file(folder / name)
        except (OSError, SafetensorError) as error:
            raise unreadable(folder / name, error) from error
    check_shapes(folder, shape, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    if shape.tied:
        tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"])
    return {name: tensors[name] for name in shape.tensors()}
