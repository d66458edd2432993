"""The smallest model and lake that a bench can be tried on."""

from typing import Any

MODEL_CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 512,
}
LAKE: dict[str, Any] = {
    "environment": "rollart.tasks.frozenlake:FrozenLake",
    "environment_settings": {"size": 2},
    "hold_out": "seed",
    "environments": 8,
    "max_turns": 4,
    "max_turn_tokens": 4,
    "max_context": 512,
}
RUN: dict[str, Any] = {
    "name": "tiny",
    "codec": "rollart.backends.environments.codec:LetterCodec",
    "batch": {"trajectories": 8, "group_size": 4},
    "pools": {"local": {}},
}
