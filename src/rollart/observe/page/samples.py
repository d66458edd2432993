"""Sampled trajectories token by token, read from the JSON lines beside their texts."""

from pathlib import Path

import msgspec


class Token(msgspec.Struct, frozen=True, array_like=True):
    """A sampled token. `text` is empty if it has none of its own: a special token, or part of a character."""

    text: str
    id: int
    logprob: float
    version: int
    """Index into `Sample.versions`."""


class Part(msgspec.Struct, frozen=True, omit_defaults=True):
    """An observation, which has `text`, or an answer, which has `tokens`."""

    text: str = ""
    tokens: tuple[Token, ...] = ()
    turn: int = 0
    """Number of the answer, from 1; 0 for an observation."""
    earned: float = 0.0
    new_context: bool = False
    """Starts a new context: the agent's history was rewritten."""


class Sample(msgspec.Struct, frozen=True, omit_defaults=True):
    """One trajectory."""

    trajectory: int
    task: str
    kind: str
    """`train`, `eval` or `failed`."""
    prompt: str
    step: int
    """Step of the weights that it started with."""
    outcome: str
    reward: float | None
    cause: str
    versions: tuple[str, ...]
    parts: tuple[Part, ...]
    left_out: int = 0
    """Number of parts omitted at the end."""


MOST_SAMPLES = 60
MOST_BYTES = 1_500_000

_decoder = msgspec.json.Decoder(Sample)


def read_samples(folder: Path) -> list[Sample]:
    """A bounded selection: for every task and kind the newest first, then the oldest, then those between."""
    lines: dict[tuple[str, str], list[tuple[int, Sample]]] = {}
    for path in sorted(folder.glob("step-*.jsonl")):
        for line in path.read_bytes().splitlines():
            try:
                sample = _decoder.decode(line)
            except msgspec.MsgspecError:
                continue  # the writer was killed in the middle of this line
            lines.setdefault((sample.task, sample.kind), []).append((len(line), sample))
    chosen: list[Sample] = []
    nbytes = 0
    queues = [_ends_first(found) for _, found in sorted(lines.items())]
    for number in range(max(map(len, queues), default=0)):
        for queue in queues:
            if number < len(queue) and len(chosen) < MOST_SAMPLES and nbytes + queue[number][0] <= MOST_BYTES:
                nbytes += queue[number][0]
                chosen.append(queue[number][1])
    return sorted(chosen, key=lambda sample: (sample.task, sample.kind, sample.step, sample.trajectory))


def _ends_first(found: list[tuple[int, Sample]]) -> list[tuple[int, Sample]]:
    """Reorder: last, first, second to last, second, …"""
    turned = found[::-1]
    return [pair for both in zip(turned, found, strict=True) for pair in both][: len(found)]
