"""The initial model of the presets: a small model from scratch, trained on transcripts of the built-in tasks.

    python -m rollart.app.cold_start '{"folder": "model", "seed": 0}'

creates it. The process exits when its standard input is closed.
"""

import json
import os
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rollart.backends.environments.hf_codec import HfCodec
from rollart.backends.trainers.cold_start import ColdStartSettings, Report, cold_start, silent
from rollart.backends.trainers.supervised import Turns
from rollart.config.suggest import did_you_mean
from rollart.tasks.builtin import BUILT_IN, transcripts
from rollart.tasks.tokenizer import build_tokenizer, tokenizer_files
from rollart.types.errors import RequestError

SMALL_MODEL: Mapping[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "attention_bias": True,  # lets a head attend by distance alone, and so copy numbers, from the start
    "initializer_range": 0.08,  # about 1/√hidden_size; the usual 0.02 is for wide models
}
TRANSCRIPTS = {"frozenlake": 1300, "math": 3800, "game": 2600}
"""Transcripts per task, of the quickstart; one of FrozenLake is as long as three or four of the others."""


def make_small_model(
    folder: Path,
    *,
    seed: int = 0,
    report: Report = silent,
    tasks: Mapping[str, int] | None = None,
    config: Mapping[str, Any] | None = None,
    **changes: Any,
) -> float:
    """Create the model and write it to `folder`, with its tokenizer. Returns the last loss.

    `tasks`: number of transcripts of each built-in task that the model learns; their texts alone are the tokenizer's
    vocabulary. By default the three tasks of the quickstart. `config` overrides fields of `SMALL_MODEL`, `changes`
    fields of `ColdStartSettings`.
    """
    counts = TRANSCRIPTS if tasks is None else tasks
    for name in counts:
        if name not in BUILT_IN:
            known = ", ".join(BUILT_IN)
            raise RequestError(f"a cold start cannot learn {name!r}{did_you_mean(name, BUILT_IN)}; it knows {known}")
    tokenizer = build_tokenizer(text for name in counts for text in BUILT_IN[name].texts)
    files = tokenizer_files(tokenizer)
    with tempfile.TemporaryDirectory() as beside:
        for name, data in files.items():
            (Path(beside) / name).write_bytes(data)
        codec = HfCodec(beside)
    fitting = {"vocab_size": codec.vocabulary, "eos_token_id": codec.stop_tokens[0]}
    learned = [
        turns
        for name, count in counts.items()
        for turns in in_tokens(codec, (each.turns for each in transcripts(name, count, seed=seed)))
    ]
    model = {"config": {**SMALL_MODEL, **(config or {}), **fitting}}
    settings = ColdStartSettings(model=model, seed=seed, **changes)
    return cold_start(settings, learned, folder, files, report)


def in_tokens(codec: HfCodec, episodes: Iterable[tuple[tuple[str, str], ...]]) -> list[Turns]:
    """Tokenise transcripts exactly as an agent would have seen them."""
    return [
        [
            (codec.render(observation, first=not turn), codec.answer(answer))
            for turn, (observation, answer) in enumerate(t)
        ]
        for t in episodes
    ]


def end_with_parent() -> None:
    """Exit this process as soon as its standard input is closed, by the parent or by the parent's death."""

    def wait() -> None:
        sys.stdin.read()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _say(steps: int, loss: float) -> None:
    sys.stdout.write(f"cold start: {steps} steps, loss {loss:.3f}\n")
    sys.stdout.flush()


def _main(order: str) -> None:
    end_with_parent()
    with suppress(OSError):  # the name shown by `top`
        Path("/proc/self/comm").write_text("cold start", encoding="utf-8")
    wanted = json.loads(order)
    make_small_model(Path(wanted.pop("folder")), report=_say, **wanted)


if __name__ == "__main__":
    _main(sys.argv[1])
