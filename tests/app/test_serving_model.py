"""What `rollart serve` finds in a folder: runs, their checkpoints, models and adapters from elsewhere."""

import json
from pathlib import Path

import pytest
import torch
from real_cli import small_task
from safetensors.torch import load_file
from served import tiny_checkpoint
from tiny_work import MODEL_CONFIG

import rollart
from rollart.app.serving.model import open_model
from rollart.backends.environments.codec import ByteCodec
from rollart.backends.environments.conversation import CodecConversations, HfConversations
from rollart.backends.models import build_model
from rollart.types.errors import RequestError

LORA = {"adapter_config.json": '{"peft_type": "LORA"}', "adapter_model.safetensors": "x"}
SIZE = {"vocab_size": 260, "max_position_embeddings": 16384}


def trained(folder, monkeypatch, **changes):
    """A run of one step over bytes, without a tokenizer."""
    monkeypatch.chdir(folder)
    small_task(folder)
    model = {"config": {**MODEL_CONFIG, **SIZE}}
    return rollart.run("config.toml", steps=1, model=model, out=folder / "first", **changes)


def test_a_run_its_newest_checkpoint_and_its_codec(tmp_path, monkeypatch):
    result = trained(tmp_path, monkeypatch)
    for path in (result.folder, Path("first"), Path(result.checkpoint)):
        with open_model(path) as served:
            assert served.name == "first"
            assert served.folder.resolve() == Path(result.checkpoint).resolve()
            assert isinstance(served.conversations, CodecConversations)
            assert served.conversations.render([("user", "Hi")]) == ByteCodec().render("Hi", first=True)
            assert served.default_context() == 8192
    with pytest.raises(RequestError, match="--base is for adapters"), open_model(Path("first"), base=tmp_path):
        pass
    # Taken out of its run, nothing says how text becomes tokens.
    alone = Path(result.checkpoint).rename(tmp_path / "alone")
    with pytest.raises(RequestError, match=r"no tokenizer\.json"), open_model(alone):
        pass


def test_a_run_with_adapters_is_merged_while_it_is_open(tmp_path, monkeypatch):
    pytest.importorskip("peft", reason="PEFT is not installed: pip install 'rollart[lora]'")
    result = trained(tmp_path, monkeypatch, trainer={"learning_rate": 0.1, "lora": {"rank": 2}})
    with open_model(result.folder, name="mine") as served:
        assert served.name == "mine"
        folder = served.folder
        merged = load_file(folder / "model.safetensors")
    assert not folder.exists()
    base = load_file(result.folder / "model" / "model.safetensors")
    assert merged.keys() == base.keys()


def test_a_checkpoint_from_elsewhere(tmp_path, monkeypatch):
    folder = tiny_checkpoint(tmp_path / "tiny")
    monkeypatch.chdir(folder)
    with open_model(Path()) as served:
        assert served.name == "tiny"
        assert isinstance(served.conversations, HfConversations)
        assert served.default_context() == MODEL_CONFIG["max_position_embeddings"]


@pytest.mark.parametrize("named", [True, False])
def test_an_adapter_from_elsewhere(tmp_path, named):
    peft = pytest.importorskip("peft", reason="PEFT is not installed: pip install 'rollart[lora]'")
    base = tiny_checkpoint(tmp_path / "base")
    model = build_model(str(base), dtype="float32", device="cpu")
    settings = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, settings)
    adapted.save_pretrained(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    described = json.loads(file.read_text())
    file.write_text(json.dumps(described | {"base_model_name_or_path": str(base) if named else "someone/base"}))
    with open_model(tmp_path / "adapter", base=None if named else base) as served:
        assert served.name == "adapter"
        assert isinstance(served.conversations, HfConversations)
        merged = load_file(served.folder / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    torch.testing.assert_close(merged[name], adapted.merge_and_unload().state_dict()[name])


@pytest.mark.parametrize(
    ("files", "base", "word"),
    [
        ({}, None, "not a folder with a config.json"),
        ({"config.json": "{}"}, None, "model_type"),
        ({"config.json": "{}"}, "base", "has no adapter_config.json"),
        ({**LORA, "adapter_config.json": '{"peft_type": "LORA", "base_model_name_or_path": "x/y"}'}, None, "'x/y'"),
        (LORA, None, "name one with --base"),
        (LORA, "base", "not a checkpoint folder"),
        ({**LORA, "adapter_config.json": "{"}, None, "no JSON object"),
        ({**LORA, "adapter_config.json": "3"}, None, "no JSON object"),
        ({"adapter_config.json": '{"peft_type": "LORA"}', "adapter_model.bin": "x"}, None, "other formats"),
        ({"adapter_config.json": '{"peft_type": "PROMPT_TUNING"}'}, None, "only LORA"),
    ],
)
def test_folders_that_cannot_be_served(tmp_path, files, base, word):
    (tmp_path / "model").mkdir()
    for name, text in files.items():
        (tmp_path / "model" / name).write_text(text)
    named = None if base is None else tmp_path / base
    with pytest.raises(RequestError, match=word), open_model(tmp_path / "model", base=named):
        pass


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(RequestError, match="is not a folder"), open_model(tmp_path / "nothing"):
        pass
