"""`rollart eval`: how a trained model does on held-out episodes."""

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from rollart.backends.trainers.checkpoint import Checkpoints
from rollart.cli.compose import check_real, real_parts
from rollart.cli.running import CHECKPOINTS, read_config
from rollart.config.schema import RunConfig
from rollart.config.suggest import did_you_mean
from rollart.control.pipeline import run_pipeline
from rollart.observe.journal import MemoryJournal
from rollart.types.errors import RequestError, RunError
from rollart.types.journal import EvalEnded


def evaluate(
    run: Annotated[Path, typer.Argument(help="Folder of a run, or of one of its checkpoints.")],
    task: Annotated[str, typer.Option(help="The task; not needed where there is only one.")] = "",
    episodes: Annotated[int, typer.Option(min=1, help="Held-out episodes to play.")] = 100,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout and nothing else.")] = False,
) -> None:
    """Play held-out episodes with a trained model, sampled as in training, and say its mean reward.

    A run's newest checkpoint is taken, or the checkpoint that is named. Nothing is written.

    Example: rollart eval runs/frozenlake-1 --task frozenlake --episodes 500
    """
    folder, checkpoint = find(run)
    config = config_for(read_config(folder), checkpoint, task, episodes)
    check_real(config)
    ended = asyncio.run(play(config))
    if json:
        figures = {"checkpoint": str(checkpoint), **msgspec.to_builtins(ended)}
        sys.stdout.write(msgspec.json.encode(figures).decode() + "\n")
        return
    sys.stdout.write(
        f"{ended.task}: mean reward {ended.mean_reward:.3f} over {ended.scored} of {ended.episodes} held-out episodes "
        f"({checkpoint})\n"
    )


def find(path: Path) -> tuple[Path, Path]:
    """The run folder and the checkpoint that are meant."""
    if (path / CHECKPOINTS).is_dir():
        newest = Checkpoints(path / CHECKPOINTS).newest()
        if newest is None:
            raise RequestError(f"{path}: the run has no checkpoint yet; set checkpoint_every, or wait for the first")
        return path, newest.folder
    if (path / "config.json").is_file() and path.parent.name == CHECKPOINTS:
        return path.parent.parent, path
    raise RequestError(f"{path} is neither the folder of a run nor a checkpoint of one; look below runs/")


def config_for(config: RunConfig, checkpoint: Path, task: str, episodes: int) -> RunConfig:
    """The config of a run, for no step and one evaluation of one task."""
    if not task and len(config.tasks) > 1:
        raise RequestError(f"--task is missing; the run has {', '.join(config.tasks)}")
    name = task or next(iter(config.tasks))
    if name not in config.tasks:
        raise RequestError(
            f"--task {name!r} is not in the run{did_you_mean(name, config.tasks)}; it has {', '.join(config.tasks)}"
        )
    if config.trainer.lora is not None:
        raise RequestError(f"{checkpoint} is an adapter; merge it into its model with PEFT and evaluate that")
    only = config.tasks[name].model_copy(update={"eval_episodes": episodes})
    changes = {"model": str(checkpoint), "tasks": {name: only}, "steps": 0, "eval_every": 1, "checkpoint_every": 0}
    return config.model_copy(update=changes)


async def play(config: RunConfig) -> EvalEnded:
    """The one evaluation of such a config, in this process. Nothing is written."""
    # Imported late: what these pull in, the other commands do without.
    from rollart.backends.stores.memory import MemoryStore
    from rollart.distributed.inline import InlineRuntime

    journal = MemoryJournal()
    await run_pipeline(config, real_parts(config, InlineRuntime(), journal, MemoryStore()))
    ended = next((event for event in journal.events if isinstance(event, EvalEnded)), None)
    if ended is None or ended.mean_reward is None:
        raise RunError("no episode came to an end; look at the environment, or try `rollart doctor`")
    return ended
