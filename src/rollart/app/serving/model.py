"""The model to serve: of a run, or any checkpoint folder that the torch engine takes."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from rollart.app.checkpoints import CHECKPOINTS
from rollart.app.compose import HF_CODEC, codec_of
from rollart.app.evaluation import as_model, find_checkpoint
from rollart.app.run_folder import JOURNAL
from rollart.app.running import MODEL, read_config
from rollart.backends.engines.checkpoint_config import ModelShape, read_shape
from rollart.backends.engines.checkpoint_header import check_weights
from rollart.backends.environments.conversation import CodecConversations, Conversations, HfConversations
from rollart.config.schema import RunConfig
from rollart.types.errors import RequestError

ADAPTER, FACTORS = "adapter_config.json", "adapter_model.safetensors"
LONGEST_CONTEXT = 8192
"""Default limit of the context; KV memory is reserved for all that an answer may need."""


class ServedModel(NamedTuple):
    """A checkpoint as a folder with whole weights, which may be temporary."""

    folder: Path
    name: str
    shape: ModelShape
    conversations: Conversations

    def default_context(self) -> int:
        return min(self.shape.positions, LONGEST_CONTEXT)


@contextmanager
def open_model(path: Path, *, base: Path | None = None, name: str = "") -> Iterator[ServedModel]:
    """Find and check the model of `path`; the folder is valid within the block.

    `path` is the folder of a run (its newest checkpoint), of one of its checkpoints, a checkpoint in Hugging Face
    layout, or a PEFT adapter, whose base model is `base` or the folder that it names. Adapters are merged.
    """
    if _of_run(path):
        if base is not None:
            raise RequestError("--base is for adapters from elsewhere; the run knows its own base model")
        run, checkpoint = find_checkpoint(path)
        config = read_config(run)
        with as_model(config, run, checkpoint) as folder:
            yield _model(folder, name or run.absolute().name, config)
    elif (path / ADAPTER).is_file():
        base = _base_of(path, base)
        from rollart.backends.trainers.lora import write_merged  # late: it needs torch

        with tempfile.TemporaryDirectory(prefix="rollart-serve-") as scratch:
            merged = Path(scratch) / MODEL
            write_merged(merged, str(base), path)
            yield _model(merged, name or path.absolute().name, None)
    elif base is not None:
        raise RequestError(f"--base is for adapters, but {path} has no {ADAPTER}; omit it")
    else:
        yield _model(path, name or path.absolute().name, None)


def _of_run(path: Path) -> bool:
    """Whether this is a run, which has a `config.json` of its own, or one of its checkpoints."""
    if (path / JOURNAL).is_file() or (path / CHECKPOINTS).is_dir():
        return True
    return path.absolute().parent.name == CHECKPOINTS and (path.absolute().parent.parent / JOURNAL).is_file()


def _base_of(path: Path, base: Path | None) -> Path:
    """The folder of an adapter's base model. Adapters that could not be merged safely are refused."""
    try:
        described = dict(json.loads((path / ADAPTER).read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise RequestError(f"{path / ADAPTER} is no JSON object ({error}); download the adapter again") from error
    if described.get("peft_type") != "LORA":
        raise RequestError(f"{path} is an adapter of type {described.get('peft_type')}; only LORA can be merged")
    if not (path / FACTORS).is_file():
        raise RequestError(f"{path} has no {FACTORS}; other formats are not supported")
    if base is None:
        named = described.get("base_model_name_or_path")
        base = Path(named or "")
        if not named or not base.is_dir():
            raise RequestError(f"{path} is an adapter on {named!r}, which is no folder here; name one with --base")
    if not (base / "config.json").is_file():
        raise RequestError(f"--base {base} is not a checkpoint folder: it has no config.json")
    return base


def _model(folder: Path, name: str, config: RunConfig | None) -> ServedModel:
    if not folder.is_dir():
        raise RequestError(f"{folder} is not a folder; give a run, one of its checkpoints, or a checkpoint folder")
    shape = read_shape(str(folder))
    check_weights(folder, shape)
    return ServedModel(folder, name, shape, _conversations(folder, config))


def _conversations(folder: Path, config: RunConfig | None) -> Conversations:
    own_codec = config is not None and config.codec not in ("", HF_CODEC)
    if (folder / "tokenizer.json").is_file() and not own_codec:
        return HfConversations(folder)
    if config is None:
        raise RequestError(
            f"{folder} has no tokenizer.json, and is not part of a run that names a codec; add the tokenizer's files"
        )
    return CodecConversations(codec_of(config))
