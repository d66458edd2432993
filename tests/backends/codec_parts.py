"""Folders with a tokenizer and a chat template, made on the spot: a small one, and one like Qwen's."""

import json

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from rollart.tasks.tokenizer import build_tokenizer, tokenizer_files

QWEN_LIKE = """{%- if messages[0].role != 'system' %}
{{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
MARKERS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def small_folder(folder):
    for name, data in tokenizer_files(build_tokenizer(["go up", "left, please"])).items():
        (folder / name).write_bytes(data)
    return str(folder)


def chat_folder(folder, template=QWEN_LIKE, tokenizer=None):
    """A byte-level BPE with merges, as of Qwen, and its markers; the eos token is the end of a turn."""
    (tokenizer or merging_tokenizer()).save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    if template is not None:
        about["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return str(folder)


def merging_tokenizer():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["go left go left right up down and so on and on"] * 5, trainer)
    tokenizer.add_special_tokens([AddedToken(marker, special=True, normalized=False) for marker in MARKERS])
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    return tokenizer
