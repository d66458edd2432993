"""A task that no random model solves and a short supervised training does; tests name it by factory path."""

import random
from collections.abc import Sequence
from typing import Any


class Parrot:
    """Say the letter, then the next one; one point each."""

    def reset(self, *, seed: int, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:  # noqa: ARG002
        self.letter, self.turn = "abcd"[seed % 4], 0
        return f"say {self.letter}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        right, self.turn = action == self.letter, self.turn + 1
        self.letter = chr(ord(self.letter) + 1)
        return f"say {self.letter}", 0.5 * right, self.turn == 2, False, {}


def player(observations: Sequence[str], chance: random.Random) -> str:  # noqa: ARG001
    return observations[-1][-1]


def clumsy(observations: Sequence[str], chance: random.Random) -> str:
    return observations[-1][-1] if chance.random() < 0.5 else "x"


def silent(observations: Sequence[str], chance: random.Random) -> None:  # noqa: ARG001
    return None


def verbose(observations: Sequence[str], chance: random.Random) -> str:  # noqa: ARG001
    return "well, " + observations[-1]


CONFIG: dict[str, Any] = {
    "name": "parrot",
    "tasks": {
        "parrot": {
            "environment": f"{__file__}:Parrot",
            "environments": 8,
            "max_turns": 3,
            "max_turn_tokens": 4,
            "max_context": 64,
            "hold_out": "seed",
        }
    },
    "pools": {"local": {}},
    "batch": {"trajectories": 8, "group_size": 4},
    "sft": {"steps": 60, "batch_tokens": 256, "learning_rate": 1e-2, "episodes": 40, "held_out_share": 0.1},
    "model": {
        "config": {
            "model_type": "qwen3",
            "vocab_size": 260,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "max_position_embeddings": 128,
            "tie_word_embeddings": True,
            "initializer_range": 0.15,
        }
    },
}
