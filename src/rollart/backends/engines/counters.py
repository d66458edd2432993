"""What an engine has done since it started, as plain numbers."""

import msgspec


class TaskCounters(msgspec.Struct):
    """Of one task. Seconds of a step are shared out by its tokens."""

    prefill_tokens: int = 0
    """Tokens that were computed before one was sampled: of prompts, and what an update made void."""
    prefill_s: float = 0.0
    decode_tokens: int = 0
    """Tokens that were sampled."""
    decode_s: float = 0.0
    cached_tokens: int = 0
    """Prompt tokens whose KV was there, kept from a turn before or shared with another session."""
    recomputed_tokens: int = 0


class EngineCounters(msgspec.Struct):
    tasks: dict[str, TaskCounters] = {}
    steps: int = 0
    batch_tokens: int = 0
    """Tokens of all steps; divided by `steps`, the mean size of a step."""
    batch_requests: int = 0
    """Requests of all steps; divided by `steps`, the mean size of the batch."""
    largest_batch: int = 0
    stalled_steps: int = 0
    """Steps in which a request waited because the KV memory was full."""
    prefix_misses: int = 0
    evicted_sessions: int = 0
    updates: int = 0
    update_s: float = 0.0
    """Spent in updates themselves, without the recomputation of KV."""

    def task(self, name: str) -> TaskCounters:
        return self.tasks.setdefault(name, TaskCounters())
