"""Weight files of a checkpoint and their headers, read quickly and without torch."""

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from rollart.backends.engines.checkpoint_config import ModelShape
from rollart.types.errors import RequestError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def check_weights(folder: Path, shape: ModelShape) -> None:
    """Refuse a checkpoint whose tensors do not match its config, or that is only a pointer (such as Git LFS)."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name in weight_files(folder):
        try:
            with safe_open(folder / name, framework="numpy") as file:
                shapes |= {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise unreadable(folder / name, error) from error
    check_shapes(folder, shape, shapes)


def check_shapes(folder: Path, shape: ModelShape, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Compare tensor shapes with the config. An output head tied to the embedding may be missing."""
    head = {"lm_head.weight": shapes.get("model.embed_tokens.weight")} if shape.tied else {}
    wrong = [name for name, wanted in shape.tensors().items() if shapes.get(name, head.get(name)) != wanted]
    if wrong:
        raise RequestError(f"the checkpoint in {str(folder)!r} does not have the {wrong[:3]} of its config.json")


def weight_files(folder: Path) -> list[str]:
    """File names: a single file, or the shards of an index."""
    if (folder / _SINGLE).is_file():
        return [_SINGLE]
    if (folder / _INDEX).is_file():
        index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
        return sorted(set(index["weight_map"].values()))
    raise RequestError(f"{str(folder)!r} has neither {_SINGLE} nor {_INDEX}; other formats are not supported")


def unreadable(file: Path, error: Exception) -> RequestError:
    return RequestError(f"{file} cannot be read ({error}); download the checkpoint again")
