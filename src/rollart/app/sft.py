"""Supervised training from request to model; shared by `rollart sft` and `rollart.sft`.

    <folder>/config.json      the config, and what it was trained on: sft.json
    <folder>/metrics.jsonl    loss of every step, held-out loss
    <folder>/checkpoints/     what an interrupted training resumes from; with LoRA, adapters
    <folder>/model/           the result: `rollart train` starts from it as `model`; LoRA factors are merged

Invariants: `model/` is complete or absent; a training that was interrupted and resumed gives the same weights; it is
resumed on the same demonstrations or not at all.
"""

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from rollart.app.checkpoints import CHECKPOINTS
from rollart.app.compose import check_real, codec_of, is_cold_start
from rollart.app.demonstrations import Demonstration, read_demonstrations
from rollart.app.run_folder import held
from rollart.app.running import MODEL, free_folder, read_config
from rollart.config.load import check
from rollart.config.schema import RunConfig
from rollart.config.training import Schedule, TrainerSettings
from rollart.observe.files import append_whole
from rollart.observe.metrics import LINES
from rollart.types.digests import record_digest
from rollart.types.errors import ConfigError, Interrupted, RequestError
from rollart.types.trajectory import TrainSample

if TYPE_CHECKING:
    from rollart.backends.trainers.supervised import Progress

TRAINED_ON = "sft.json"
QUIET_S = 15.0
"""Time without progress on stderr, at the most, while steps are made."""
BETAS = (0.9, 0.98)
FINAL_SHARE = 0.05
RATES = {"scratch": 1e-3, "lora": 5e-4, "folder": 5e-5}


class TrainedOn(msgspec.Struct, frozen=True):
    """What a supervised training was started with."""

    sources: tuple[str, ...]
    digest: str
    """Digest of the tokenised demonstrations."""


class SftStep(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of `metrics.jsonl`."""

    step: int
    loss: float
    held_out: float | None = None


@dataclass(frozen=True, slots=True)
class SftResult:
    """The outcome of a supervised training."""

    folder: Path
    model: Path
    """A model folder, to be the `model` of a run."""
    steps: int
    loss: float
    """Loss of the last step."""
    held_out: float | None
    """Mean of -log p over the answers of the held-out demonstrations, after the last step; None without any."""
    demonstrations: int


def start_sft(
    tables: Mapping[str, Any], sources: Sequence[str], out: Path | None, say: Callable[[str], None]
) -> SftResult:
    """A new training. `sources` as in `demonstrations`."""
    config = _checked(tables)
    if not sources:
        raise RequestError("give the demonstrations: a JSON-lines file, the folder of a run, or a player")
    found = read_demonstrations(config, sources, say)
    folder = free_folder(out, f"{config.name}-sft", config)
    (folder / TRAINED_ON).write_bytes(msgspec.json.encode(TrainedOn(tuple(sources), _digest(found))) + b"\n")
    return _carry_out(config, folder, found, say)


def resume_sft(folder: Path, say: Callable[[str], None]) -> SftResult:
    """Go on with a training that was interrupted."""
    if not (folder / TRAINED_ON).is_file():
        raise RequestError(f"{folder} has no {TRAINED_ON}; give the folder of an interrupted `rollart sft`")
    if (folder / MODEL).is_dir():
        raise RequestError(f"{folder} is finished: its model is {folder / MODEL}")
    config = read_config(folder)
    before = msgspec.json.decode((folder / TRAINED_ON).read_bytes(), type=TrainedOn)
    found = read_demonstrations(config, before.sources, say)
    if _digest(found) != before.digest:
        raise RequestError(
            f"the demonstrations of {folder} are not those that it was started with ({', '.join(before.sources)}); "
            "restore them, or start a new training"
        )
    return _carry_out(config, folder, found, say)


def _checked(tables: Mapping[str, Any]) -> RunConfig:
    config = check(RunConfig, tables)
    if is_cold_start(config):
        raise ConfigError(
            "model",
            "a cold start is made by the run itself; give a model folder, or [model.config] for one from scratch",
        )
    check_real(config)
    if config.trainer.ranks > 1:
        raise ConfigError("trainer.ranks", f"supervised training has one rank, not {config.trainer.ranks}")
    return config


def _carry_out(
    config: RunConfig, folder: Path, found: Sequence[Demonstration], say: Callable[[str], None]
) -> SftResult:
    say(f"folder: {folder}")
    try:
        with held(folder):
            return _train(config, folder, found, say)
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted. Resume with: rollart sft --resume {folder}") from None


def _train(config: RunConfig, folder: Path, found: Sequence[Demonstration], say: Callable[[str], None]) -> SftResult:
    # Several threads that spin while they wait for each other are twenty times slower on a machine that is busy.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Late imports: torch takes seconds, and a wrong request is refused without it.
    from rollart.backends.trainers.packing import items
    from rollart.backends.trainers.supervised import (
        Plan,
        SupervisedTrainer,
        fed_tokens,
        sample,
        steps_of_epochs,
        train,
    )

    sft, vocabulary = config.sft, codec_of(config).vocabulary
    samples = [sample(number, each.sequences, sft.observation_weight) for number, each in enumerate(found)]
    trained, watched = split(samples, sft.held_out_share, config.seed)
    sizes = [fed_tokens(items([each], vocabulary)) for each in trained]
    steps = sft.steps or steps_of_epochs(sft.epochs, sizes, sft.batch_tokens, config.seed)
    trainer = SupervisedTrainer(
        {
            "model": config.model,
            "model_source": Path(config.model) if isinstance(config.model, str) else None,
            "seed": config.seed,
            "trainer": trainer_settings(config, steps),
            "checkpoints": str((folder / CHECKPOINTS).absolute()),
            "keep_checkpoints": config.keep_checkpoints,
        }
    )
    say(f"{len(trained)} demonstrations to train on, {len(watched)} held out; {sum(sizes):,} tokens, {steps} steps")
    if trainer.done:
        say(f"resumes from step {trainer.done}")
    last = SftStep(trainer.done, math.nan)
    said_at = time.monotonic()

    def report(progress: "Progress") -> None:
        nonlocal last, said_at
        last = SftStep(progress.step, progress.loss, progress.held_out)
        append_whole(folder / LINES, msgspec.json.encode(last) + b"\n")
        due = progress.held_out is not None or progress.step % sft.eval_every == 0 or progress.step == steps
        if due or time.monotonic() - said_at > QUIET_S:
            said_at = time.monotonic()
            measured = "" if progress.held_out is None else f", held out {progress.held_out:.4f}"
            say(f"step {progress.step}/{steps}: loss {progress.loss:.4f}{measured}")

    try:
        train(
            trainer,
            Plan(steps, sft.batch_tokens, config.seed, sft.eval_every, sft.checkpoint_every),
            trained,
            watched,
            report,
        )
        _write_model(config, folder, trainer.model)
    finally:
        trainer.close()
    say(f"model: {folder / MODEL}")
    return SftResult(folder, folder / MODEL, steps, last.loss, last.held_out, len(found))


def trainer_settings(config: RunConfig, steps: int) -> TrainerSettings:
    """The `[trainer]` of the config, with the rate and the schedule of supervised training."""
    scratch, lora = isinstance(config.model, dict), config.trainer.lora is not None
    rate = config.sft.learning_rate or RATES["lora" if lora else "scratch" if scratch else "folder"]
    warmup = min(steps - 1, round(config.sft.warmup_share * steps))
    schedule = Schedule(kind="cosine", warmup_steps=warmup, total_steps=steps, final_share=FINAL_SHARE)
    changes = {"learning_rate": rate, "schedule": schedule, "betas": BETAS, "ranks": 1}  # ranks may be `auto`
    return config.trainer.model_copy(update=changes)


def split(samples: Sequence[TrainSample], share: float, seed: int) -> tuple[list[TrainSample], list[TrainSample]]:
    """Samples to train on, and held-out ones; at least one to train on."""
    count = min(round(share * len(samples)), len(samples) - 1)
    aside = set(np.random.default_rng([seed, 1]).permutation(len(samples))[:count].tolist())
    return (
        [each for number, each in enumerate(samples) if number not in aside],
        [each for number, each in enumerate(samples) if number in aside],
    )


def _write_model(config: RunConfig, folder: Path, model: Any) -> None:
    from rollart.backends.trainers.lora import write_merged
    from rollart.backends.trainers.training_state import write_model

    if config.trainer.lora is None:
        write_model(folder / MODEL, config.model, model)
        return
    from rollart.backends.trainers.checkpoint import Checkpoints

    saved = Checkpoints(folder / CHECKPOINTS)
    write_merged(folder / MODEL, config.model, saved.folder(saved.held()[-1]), config.seed)


def _digest(found: Sequence[Demonstration]) -> str:
    return record_digest(msgspec.msgpack.encode([(each.task, each.sequences) for each in found]))
