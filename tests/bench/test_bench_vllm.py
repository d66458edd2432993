import json
import subprocess
import sys

import pytest

from rollart.bench.vllm import main


@pytest.mark.parametrize(
    "arguments", [[], ["folder"], ["folder", "no-such-file"], ["folder", "[]"], ["folder", "[[4]]"]]
)
def test_a_wrong_request_is_told(arguments, capfd):
    assert main(arguments) == 2
    out, err = capfd.readouterr()
    assert not out
    assert "usage:" in err


def test_one_json_line_and_nothing_else(tmp_path):
    pytest.importorskip("vllm", reason="needs vLLM: `make test-vllm` runs it in an environment of its own")
    from transformers import AutoConfig

    AutoConfig.for_model(
        "qwen3",
        architectures=["Qwen3ForCausalLM"],
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=128,
    ).save_pretrained(tmp_path)
    command = [sys.executable, "-m", "rollart.bench.vllm", str(tmp_path), "[[5, 8], [20, 3]]"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    (line,) = done.stdout.splitlines()
    figures = json.loads(line)
    assert figures["tokens"] == 11
    assert figures["tokens_per_cpu_s"] > 0
    assert figures["offline_tokens_per_cpu_s"] > 0
