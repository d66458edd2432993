"""Held-out evaluation of a checkpoint, outside of any run."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollart.app.checkpoints import CHECKPOINTS, local_root
from rollart.app.compose import real_parts
from rollart.app.run_folder import JOURNAL
from rollart.app.running import MODEL, read_config
from rollart.backends.trainers.checkpoint import Checkpoints
from rollart.config.schema import RunConfig
from rollart.config.suggest import did_you_mean
from rollart.control.pipeline import run_pipeline
from rollart.observe.journal import MemoryJournal
from rollart.types.errors import RequestError, RunError
from rollart.types.journal import EvalEnded

CONFIGS = ("config.json", "adapter_config.json")
"""Every checkpoint has one of these: the first for a model, the second for an adapter."""


def find_checkpoint(path: Path) -> tuple[Path, Path]:
    """Resolve a path to the run folder and the checkpoint."""
    root = local_root(read_config(path), path) if (path / JOURNAL).is_file() else path / CHECKPOINTS
    if root.is_dir() or (path / JOURNAL).is_file():
        newest = Checkpoints(root).newest()
        if newest is None:
            raise RequestError(
                f"{path}: the run has no checkpoint yet; it saves one when it ends, or set checkpoint_every"
            )
        return path, newest.folder
    checkpoint = path if path.parent.name == CHECKPOINTS else path.resolve()  # such as `.`, from inside of one
    if any((path / name).is_file() for name in CONFIGS) and checkpoint.parent.name == CHECKPOINTS:
        return checkpoint.parent.parent, checkpoint
    raise RequestError(f"{path} is neither the folder of a run nor a checkpoint of one; look below runs/")


@contextmanager
def as_model(config: RunConfig, folder: Path, checkpoint: Path) -> Iterator[Path]:
    """A checkpoint of the run in `folder` as a model; LoRA checkpoints are merged for the duration of the block."""
    if config.trainer.lora is None:
        yield checkpoint
        return
    from rollart.backends.trainers.lora import write_merged  # late: it needs torch

    model = str(folder / MODEL) if (folder / MODEL).is_dir() else config.model
    with tempfile.TemporaryDirectory() as scratch:
        write_merged(Path(scratch) / MODEL, model, checkpoint, config.seed)
        yield Path(scratch) / MODEL


def config_for(config: RunConfig, model: Path, task: str, episodes: int, samples: int = 0) -> RunConfig:
    """Config of a run with no steps and one evaluation of one task.

    Everything runs in this process: there is one trainer rank, and pools with their own interpreter get the torch
    engine.
    """
    if not task and len(config.tasks) > 1:
        raise RequestError(f"--task is missing; the run has {', '.join(config.tasks)}")
    name = task or next(iter(config.tasks))
    if name not in config.tasks:
        raise RequestError(
            f"--task {name!r} is not in the run{did_you_mean(name, config.tasks)}; it has {', '.join(config.tasks)}"
        )
    several = {"eval_samples": samples} if samples else {}
    only = config.tasks[name].model_copy(update={"eval_episodes": episodes, **several})
    pools = {
        pool: settings.model_copy(update={"engine": "torch", "python": ""}) if settings.python else settings
        for pool, settings in config.pools.items()
    }
    changes = {
        "model": str(model),
        "tasks": {name: only},
        "pools": pools,
        "steps": 0,
        "eval_every": 1,
        "transcripts_mb": 0,
        "trainer": config.trainer.model_copy(update={"lora": None, "ranks": 1}),
    }
    return config.model_copy(update=changes)


async def play(config: RunConfig) -> EvalEnded:
    """Run the single evaluation of such a config in this process. Writes nothing."""
    # Late imports: other commands do not need these.
    from rollart.backends.stores.memory import MemoryStore
    from rollart.distributed.inline import InlineRuntime

    journal = MemoryJournal()
    await run_pipeline(config, real_parts(config, InlineRuntime(), journal, MemoryStore()))
    ended = next((event for event in journal.events if isinstance(event, EvalEnded)), None)
    if ended is None or ended.mean_reward is None:
        raise RunError("no episode finished; check the environment, or run `rollart doctor`")
    return ended
