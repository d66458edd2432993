"""A Llama of a few thousand random weights as a GGUF file, with a byte-level tokenizer and a chat template."""

import json
from pathlib import Path

import gguf
import numpy as np
from codec_parts import QWEN_LIKE, merging_tokenizer

WIDTH, HEADS, KV_HEADS, INNER = 64, 4, 2, 96
NORMAL, CONTROL = 1, 3


def write_gguf(path: Path, template: str | None = QWEN_LIKE) -> Path:
    described = json.loads(merging_tokenizer().to_str())
    vocabulary = described["model"]["vocab"]
    markers = [token["content"] for token in described["added_tokens"]]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    tokens += [marker for marker in markers if marker not in vocabulary]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL if token in markers else NORMAL for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in described["model"]["merges"]])
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_bos_token_id(tokens.index("<|im_start|>"))
    if template is not None:
        writer.add_chat_template(template)
    rng = np.random.default_rng(0)
    kv = WIDTH // HEADS * KV_HEADS
    shapes = {
        "token_embd.weight": (len(tokens), WIDTH),
        "output.weight": (len(tokens), WIDTH),
        "output_norm.weight": (WIDTH,),
        "blk.0.attn_norm.weight": (WIDTH,),
        "blk.0.ffn_norm.weight": (WIDTH,),
        "blk.0.attn_q.weight": (WIDTH, WIDTH),
        "blk.0.attn_k.weight": (kv, WIDTH),
        "blk.0.attn_v.weight": (kv, WIDTH),
        "blk.0.attn_output.weight": (WIDTH, WIDTH),
        "blk.0.ffn_gate.weight": (INNER, WIDTH),
        "blk.0.ffn_up.weight": (INNER, WIDTH),
        "blk.0.ffn_down.weight": (WIDTH, INNER),
    }
    for name, shape in shapes.items():
        weights = np.ones(shape) if len(shape) == 1 else rng.normal(0, 0.3, shape)
        writer.add_tensor(name, weights.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
