"""The small model of the quickstart: what is made, and that the parts fit each other."""

from safetensors.torch import load_file

from rollart.app import cold_start
from rollart.app.cold_start import make_small_model
from rollart.backends.engines.torch_engine import TorchEngine
from rollart.backends.environments.hf_codec import HfCodec
from rollart.backends.stores.memory import MemoryStore


def test_the_small_model_fits_its_tokenizer(tmp_path, monkeypatch):
    monkeypatch.setattr(cold_start, "TRANSCRIPTS", dict.fromkeys(cold_start.TRANSCRIPTS, 4))
    folder = str(tmp_path / "model")
    assert 0 < make_small_model(tmp_path / "model", seed=1, steps=2) < 10
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    assert 0.8e6 < sum(tensor.numel() for tensor in tensors.values()) < 3e6
    assert len(tensors["model.embed_tokens.weight"]) == HfCodec(folder).vocabulary
    TorchEngine({"model": folder, "store": MemoryStore(), "serve_folder_as": (0, 0)}, lambda: None)
