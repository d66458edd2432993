"""Import of a pretrained model: a Hugging Face folder that engines and trainers load, from such a folder or from GGUF.

    SOURCE ──► model and tokenizer, by transformers ──► a draft ──► checks ──► OUT

The weights of a GGUF file are dequantised: the result has the precision of its quantisation at the size of `dtype`.

Invariants: `OUT` is complete and checked, or absent; nothing is downloaded, and no code of the source is run. Checked
are: that engines know the architecture and find every weight; that the tokenizer returns texts unchanged; that the chat
template can be followed turn by turn, with the tokens that transformers gives; that the model as written continues a
conversation exactly as the model that was read.
"""

import importlib.util
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rollart.backends.engines.checkpoint_config import read_shape
from rollart.types.errors import RequestError

CONFIG = "config.json"
SUFFIX = ".gguf"
TEXTS = ("Hello, world!", "12 * 7 = 84\n\n\tdone", "naïve café 東京 🙂", '{"name": "search", "arguments": {"q": "x"}}')
QUESTION = "What is the capital of France?"
CONTINUED_TOKENS = 12
CLOSE = 1e-3
OF_GGUF = ("quantization_config", "_name_or_path", "_model_name_or_path", "gguf_file")
"""Keys of a config that describe the file it was read from."""

Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True, slots=True)
class Imported:
    """A model folder that was written and checked."""

    folder: Path
    architecture: str
    parameters: int
    vocabulary: int
    continuation: str
    """First tokens of the model's greedy answer to `QUESTION`."""


class _Source(NamedTuple):
    """What was read."""

    model: Any
    tokenizer: Any
    files: Mapping[str, bytes]
    """Files of the tokenizer, by name."""


def import_model(source: Path, out: Path, dtype: Dtype, say: Callable[[str], None]) -> Imported:
    """Write the model of `source` to `out`, which must not exist."""
    if out.exists():
        raise RequestError(f"{out} already exists and is not overwritten; name a new folder")
    found = find_source(source)
    say(f"reading {found}")
    read = _read(found, dtype)
    draft = out.with_name(f".{out.name}.import")
    shutil.rmtree(draft, ignore_errors=True)  # left behind by an import that was killed
    try:
        _write(read, draft)
        say("checking weights, tokenizer, chat template and a continuation")
        imported = _checked(read, draft, out)
        draft.rename(out)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return imported


def find_source(source: Path) -> Path:
    """A GGUF file or a Hugging Face folder; the folder of one GGUF file, such as an installed package, is that file."""
    if source.is_file() and source.suffix == SUFFIX:
        return source
    if not source.is_dir():
        raise RequestError(f"{source} is neither a GGUF file nor a folder; nothing is downloaded")
    if (source / CONFIG).is_file():
        return source
    files = sorted(source.glob(f"*{SUFFIX}"))
    if len(files) != 1:
        has = f"{len(files)} GGUF files, name one" if files else f"neither {CONFIG} nor a GGUF file"
        raise RequestError(f"{source} has {has}")
    return files[0]


def _read(source: Path, dtype: Dtype) -> _Source:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    from rollart.backends.models import build_model
    from rollart.backends.trainers.training_state import source_files

    logging.disable_progress_bar()
    if source.is_dir():
        try:
            model = build_model(str(source), dtype=dtype, device="cpu")
        except (OSError, ValueError) as error:  # no safetensors, or an architecture that transformers does not know
            raise RequestError(f"transformers cannot read {source}: {error}") from error
        if not (source / "tokenizer.json").is_file():
            raise RequestError(f"{source} has no tokenizer.json; import a checkpoint with a fast tokenizer")
        return _Source(model, AutoTokenizer.from_pretrained(source), source_files(str(source), model))
    if importlib.util.find_spec("gguf") is None:
        raise RequestError("reading GGUF needs the package gguf: pip install 'rollart[gguf]'")
    try:
        loaded = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    except (ValueError, OSError, KeyError, NotImplementedError) as error:
        raise RequestError(f"transformers cannot read {source}: {error}") from error
    # A fresh model: transformers marks the one it has read as quantised, and refuses to save it.
    config = {key: value for key, value in loaded.config.to_dict().items() if key not in OF_GGUF}
    model = AutoModelForCausalLM.from_config(type(loaded.config).from_dict(config), dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model = model.to(getattr(torch, dtype)).eval()
    model.config.architectures = [type(model).__name__]
    return _Source(model, tokenizer, _tokenizer_files(tokenizer) | _generation(tokenizer))


def _tokenizer_files(tokenizer: Any) -> dict[str, bytes]:
    from rollart.backends.trainers.checkpoint import TOKENIZER_FILES

    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}
    return {name: data for name, data in files.items() if name in TOKENIZER_FILES}


def _generation(tokenizer: Any) -> dict[str, bytes]:
    """`generation_config.json`: which tokens end an answer."""
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    return {"generation_config.json": json.dumps({key: id for key, id in ids.items() if id is not None}).encode()}


def _write(read: _Source, folder: Path) -> None:
    from rollart.backends.trainers.checkpoint import write_folder
    from rollart.backends.trainers.training_state import model_files, whole_model

    layout = whole_model(read.model)
    write_folder(folder, model_files(layout, read.files, layout.tensors))


def _checked(read: _Source, folder: Path, out: Path) -> Imported:
    from rollart.backends.engines.checkpoint_header import check_weights
    from rollart.backends.environments.hf_codec import HfCodec
    from rollart.backends.models import build_model

    check_weights(folder, read_shape(str(folder)))
    codec = HfCodec(str(folder))
    for text in TEXTS:
        if codec.text(codec.answer(text)) != text:
            raise RequestError(
                f"the tokenizer does not return the text {text!r} unchanged, but as {codec.text(codec.answer(text))!r}"
            )
    said = [("user", QUESTION), ("assistant", "Paris."), ("user", "And of Japan?")]
    tokens = [
        *codec.render(said[0][1], first=True),
        *codec.answer(said[1][1]),
        *codec.render(said[2][1], first=False),
    ]
    rendered = read.tokenizer.apply_chat_template(
        [{"role": role, "content": text} for role, text in said], tokenize=False, add_generation_prompt=True
    )
    expected = read.tokenizer(rendered, add_special_tokens=False).input_ids
    if tokens != expected:
        raise RequestError(
            f"the chat template gives a conversation of {len(expected)} tokens in transformers and other ones here, of "
            f"{len(tokens)}; write a chat_template.jinja that does not join a content with the text around it"
        )
    written = build_model(str(folder), dtype=str(read.model.dtype).removeprefix("torch."), device="cpu")
    prompt = codec.render(QUESTION, first=True)
    before, after = (_continued(model, prompt, codec.stop_tokens) for model in (read.model, written))
    if before.tokens != after.tokens or not before.close_to(after):
        raise RequestError(
            f"the model as written differs from the source: it says {codec.text(after.tokens)!r} where the source says "
            f"{codec.text(before.tokens)!r}; please report a bug, with the source"
        )
    return Imported(
        out,
        written.config.architectures[0],
        sum(parameter.numel() for parameter in written.parameters()),
        codec.vocabulary,
        codec.text(before.tokens),
    )


class _Continued(NamedTuple):
    """The most likely tokens after a prompt, one after the other, and the log-probabilities of all tokens there."""

    tokens: list[int]
    logprobs: list[Any]

    def close_to(self, other: "_Continued") -> bool:
        """Up to what another order of summation changes."""
        pairs = zip(self.logprobs, other.logprobs, strict=True)
        return all(float((one - another).abs().max()) < CLOSE for one, another in pairs)


def _continued(model: Any, prompt: list[int], stops: tuple[int, ...]) -> _Continued:
    import torch

    tokens, said, logprobs = torch.tensor([prompt]), list[int](), list[Any]()
    with torch.no_grad():
        while len(said) < CONTINUED_TOKENS and not (said and said[-1] in stops):
            logprobs.append(model(tokens).logits[0, -1].float().log_softmax(-1))
            said.append(int(logprobs[-1].argmax()))
            tokens = torch.cat((tokens, torch.tensor([said[-1:]])), 1)
    return _Continued(said, logprobs)
