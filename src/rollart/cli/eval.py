"""`rollart eval`: score a trained model on held-out episodes."""

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from rollart.app.compose import check_real
from rollart.app.evaluation import as_model, config_for, find_checkpoint, play
from rollart.app.running import read_config


def evaluate(
    run: Annotated[Path, typer.Argument(help="Folder of a run, or of one of its checkpoints.")],
    task: Annotated[str, typer.Option(help="Task to evaluate; optional if there is only one.")] = "",
    episodes: Annotated[int, typer.Option(min=1, help="Held-out prompts to play.")] = 100,
    samples: Annotated[int, typer.Option(min=0, help="Attempts at each; by default those of the task.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print only one JSON object on stdout.")] = False,
) -> None:
    """Play held-out episodes with a trained model, sampled as in training, and show its mean reward.

    Uses the given checkpoint, or the newest one of a run. Writes nothing.

    Example: rollart eval runs/frozenlake-1 --task frozenlake --episodes 500
    """
    folder, checkpoint = find_checkpoint(run)
    trained = read_config(folder)
    with as_model(trained, folder, checkpoint) as model:
        config = config_for(trained, model, task, episodes, samples)
        check_real(config)
        ended = asyncio.run(play(config))
    if json:
        figures = {"checkpoint": str(checkpoint), **msgspec.to_builtins(ended)}
        sys.stdout.write(msgspec.json.encode(figures).decode() + "\n")
        return
    passed = "".join(f", pass@{k} {value:.3f}" for k, value in ended.pass_at.items())
    sys.stdout.write(
        f"{ended.task}: mean reward {ended.mean_reward:.3f} over {ended.scored} of {ended.episodes} held-out episodes"
        f"{passed} ({checkpoint})\n"
    )
