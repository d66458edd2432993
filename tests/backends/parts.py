"""A model small enough for a test, and a hand-driven worker."""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from worker_settings import worker_settings

from rollart.backends.models import build_model
from rollart.backends.stores.memory import MemoryStore
from rollart.backends.stores.tensors import pack
from rollart.ports.worker import Worker
from rollart.types.messages import FunctionsUsed, Stage, Staged, StageFailed, WorkerCommand, WorkerEvent
from rollart.types.reward_use import RewardUse, add_uses
from rollart.types.versions import Version
from rollart.types.weights import Manifest

VOCABULARY = 264
TINY = {
    "config": {
        "model_type": "qwen3",
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "initializer_range": 0.3,  # so that the distribution is far from uniform
    }
}
V1, V2, V3 = Version(0, 1), Version(0, 2), Version(0, 3)


def tiny_model(seed: int = 0) -> Any:
    return build_model(TINY, dtype="float32", device="cpu", seed=seed)


def publish(store: MemoryStore, version: Version, seed: int | None = None) -> Manifest:
    """Put a version with weights of its own into the store."""
    model = tiny_model(version.epoch * 1000 + version.step if seed is None else seed)
    manifest, buckets = pack(model.state_dict(), version=version, parent=None, bucket_bytes=8192)
    store.publish(manifest, buckets)
    return manifest


PATIENCE_S = 100.0
"""How long a worker's threads may take to answer: only a worker that is broken, never a busy machine, takes longer."""


class Driver:
    """Drives one worker in the test's thread, and records its events."""

    def __init__(
        self, factory: Callable[[Mapping[str, Any], Callable[[], None]], Worker], settings: Mapping[str, Any]
    ) -> None:
        self.woken = threading.Event()
        self.worker = factory(worker_settings(factory, settings), self.woken.set)
        self.events: list[WorkerEvent] = []
        self.staging: set[Version] = set()

    def send(self, *commands: WorkerCommand) -> None:
        self.staging |= {command.manifest.version for command in commands if isinstance(command, Stage)}
        self.worker.post(commands)

    def slice(self) -> float | None:
        """Call `advance` once; returns its `wake_at`."""
        advance = self.worker.advance(time.monotonic())
        events, wake_at = advance.events, advance.wake_at
        self.events += events
        self.staging -= {event.version for event in events if isinstance(event, Staged | StageFailed)}
        return wake_at

    def rest(self) -> list[WorkerEvent]:
        """Drive until the worker is idle and its threads have staged everything; returns new events."""
        while True:
            self.woken.clear()
            if self.slice() is None:
                if not self.staging:
                    return self.take()
                assert self.woken.wait(PATIENCE_S), f"{self.staging} not staged within {PATIENCE_S:g} s"

    def answers(self, count: int = 1, seconds: float = PATIENCE_S) -> list[WorkerEvent]:
        """Drive until there are `count` events, waiting for the worker's threads to wake it."""
        deadline = time.monotonic() + seconds
        while len(self.events) < count:
            self.woken.clear()
            wake_at = self.slice()
            if len(self.events) < count and (wake_at is None or wake_at > time.monotonic()):
                assert self.woken.wait(deadline - time.monotonic()), f"only {self.events} within {seconds} s"
        return self.take()

    def ask(self, *commands: WorkerCommand) -> list[WorkerEvent]:
        """Send commands and drive until the worker is idle."""
        self.send(*commands)
        return self.rest()

    def call(self, *commands: WorkerCommand) -> list[WorkerEvent]:
        """Send commands that have one answer each, and drive until all are answered."""
        self.send(*commands)
        return self.answers(len(commands))

    def take(self) -> list[WorkerEvent]:
        events, self.events = self.events, []
        return events


class RewardDriver(Driver):
    """Drives a reward worker. What its answers took is added up apart from them, by reward."""

    def __init__(
        self, factory: Callable[[Mapping[str, Any], Callable[[], None]], Worker], settings: Mapping[str, Any]
    ) -> None:
        super().__init__(factory, settings)
        self.uses: dict[str, RewardUse] = {}

    def slice(self) -> float | None:
        wake_at = super().slice()
        for event in self.events:
            if isinstance(event, FunctionsUsed):
                add_uses(self.uses, event.uses)
        self.events = [event for event in self.events if not isinstance(event, FunctionsUsed)]
        return wake_at


def end_threads(task: str) -> None:
    """Wait for the threads of a task's environment hosts, which are ending: a host itself waits only briefly."""
    for thread in threading.enumerate():
        if thread.name.startswith(f"{task}:"):
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), f"{thread.name} did not end"
