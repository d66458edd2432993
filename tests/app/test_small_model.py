"""The small model of the quickstart: what is made, and that the parts fit each other."""

import json

import pytest
from safetensors.torch import load_file

from rollart.app import cold_start
from rollart.app.cold_start import make_small_model
from rollart.backends.engines.torch_engine import TorchEngine
from rollart.backends.environments.hf_codec import HfCodec
from rollart.backends.stores.memory import MemoryStore
from rollart.types.errors import RequestError


def test_the_small_model_fits_its_tokenizer(tmp_path, monkeypatch):
    monkeypatch.setattr(cold_start, "TRANSCRIPTS", dict.fromkeys(cold_start.TRANSCRIPTS, 4))
    folder = str(tmp_path / "model")
    assert 0 < make_small_model(tmp_path / "model", seed=1, steps=2) < 10
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    assert 0.8e6 < sum(tensor.numel() for tensor in tensors.values()) < 3e6
    assert len(tensors["model.embed_tokens.weight"]) == HfCodec(folder).vocabulary
    TorchEngine({"model": folder, "store": MemoryStore(), "serve_folder_as": (0, 0)}, lambda: None)


@pytest.mark.parametrize("task", ["shop", "sokoban", "repair"])
def test_the_other_presets_have_models_and_tokenizers_of_their_own(tmp_path, task):
    """The small model of a task, with the words of that task alone, has at most 3 M parameters."""
    folder = tmp_path / "model"
    make_small_model(folder, steps=1, tasks={task: 3}, config={"max_position_embeddings": 640})
    tensors = load_file(folder / "model.safetensors")
    assert sum(tensor.numel() for tensor in tensors.values()) < 3e6
    codec = HfCodec(str(folder))
    assert len(tensors["model.embed_tokens.weight"]) == codec.vocabulary
    assert json.loads((folder / "config.json").read_text())["max_position_embeddings"] == 640
    assert codec.text(codec.answer("search[mug]")) == "search[mug]"


def test_a_task_that_cannot_be_learned_is_refused(tmp_path):
    with pytest.raises(RequestError, match="did you mean shop"):
        make_small_model(tmp_path / "model", tasks={"shopp": 3})
