"""Counters of an engine since its start."""

import msgspec


class TaskCounters(msgspec.Struct):
    """Counters of one task. The seconds of a step are divided in proportion to tokens."""

    prefill_tokens: int = 0
    """Tokens computed before one was sampled: prompts, and KV invalidated by an update."""
    prefill_s: float = 0.0
    decode_tokens: int = 0
    """Sampled tokens."""
    decode_s: float = 0.0
    cached_tokens: int = 0
    """Prompt tokens with cached KV, kept from an earlier turn or shared with another session."""
    recomputed_tokens: int = 0


class EngineCounters(msgspec.Struct):
    tasks: dict[str, TaskCounters] = {}
    steps: int = 0
    batch_tokens: int = 0
    """Tokens summed over all steps; divided by `steps`, the mean size of a step."""
    batch_requests: int = 0
    """Requests summed over all steps; divided by `steps`, the mean batch size."""
    largest_batch: int = 0
    stalled_steps: int = 0
    """Steps in which a request waited because the KV memory was full."""
    prefix_misses: int = 0
    evicted_sessions: int = 0
    updates: int = 0
    update_s: float = 0.0
    """Duration of updates, without the recomputation of KV."""

    def task(self, name: str) -> TaskCounters:
        return self.tasks.setdefault(name, TaskCounters())
