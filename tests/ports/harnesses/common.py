"""What the harnesses of several ports share."""

import threading
from typing import Any, TypeVar

import pytest

from rollart.backends.stores.memory import MemoryStore
from rollart.conformance.case import Case, NotApplicable
from rollart.sim.workload import TaskProfile
from rollart.types.ids import PromptId
from rollart.types.trajectory import Prompt
from rollart.types.versions import Version

H = TypeVar("H")
TASK = "conformance"
VOCABULARY = 64
MODEL = {
    "config": {
        "model_type": "qwen3",
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 128,
    }
}


def run(case: Case[H, None], harness: H) -> None:
    """One case under pytest."""
    try:
        case.run(harness)
    except NotApplicable as reason:
        pytest.skip(str(reason))


def profile(**changes: Any) -> TaskProfile:
    values: dict[str, Any] = {
        "prompt_tokens": {"kind": "uniform", "low": 10, "high": 30},
        "observation_tokens": {"kind": "uniform", "low": 5, "high": 15},
        "answer_tokens": {"kind": "lognormal", "median": 60, "sigma": 0.8},
        "turns": {"kind": "uniform", "low": 3, "high": 6},
        "reset_s": {"kind": "uniform", "low": 1.0, "high": 50.0},
        "step_s": {"kind": "uniform", "low": 0.5, "high": 1.5},
        "reward_s": {"kind": "uniform", "low": 0.1, "high": 0.5},
    }
    return TaskProfile.model_validate(values | changes)


def prompt(seed: int) -> Prompt:
    return Prompt(id=PromptId(str(seed)), task=TASK, seed=seed)


def flipped(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:]


def corrupt_memory(store: MemoryStore, version: Version, index: int) -> None:
    """Reaches into the store: it has no fault of its own to offer."""
    manifest, buckets = store._versions[version]
    store._versions[version] = (manifest, (*buckets[:index], flipped(buckets[index]), *buckets[index + 1 :]))


class Count:
    """A counter that threads share.

    Each harness has its own, known by its number: what a worker of an earlier test still does is not counted.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.value = 0
        self.number = len(COUNTS)
        COUNTS.append(self)

    def add(self) -> None:
        with self._lock:
            self.value += 1


COUNTS: list[Count] = []
