"""`rollart sft`: supervised training on demonstrations."""

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from rollart.app.api import ONE_POOL, merged
from rollart.app.running import RuntimeKind, require, say
from rollart.app.sft import resume_sft, start_sft
from rollart.cli.train import config_file, presets
from rollart.config.load import load_toml, override
from rollart.types.errors import RequestError


def sft(
    config: Annotated[
        str | None, typer.Argument(metavar="CONFIG|TASK", help="A TOML file, or an environment: capitals.py:Capitals.")
    ] = None,
    demonstrations: Annotated[
        list[str] | None,
        typer.Option(help="JSON-lines file, run folder, or player (solve.py:player); TASK=… for one task. Repeatable."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model folder to start from, in place of the config's.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Change a key: --set sft.steps=200.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the result; must be new or empty.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Folder of an interrupted training to resume.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print only one JSON object on stdout.")] = False,
) -> None:
    """Teach a model to answer as in demonstrations. `rollart train` starts from the result: its model folder.

    Example: rollart sft my.toml --demonstrations solve.py:player --set sft.steps=200 --out runs/start
    """
    require(RuntimeKind.INLINE)
    if resume is not None:
        if config is not None or demonstrations or model is not None or set_ or out is not None:
            raise RequestError("--resume uses the config and the demonstrations of the folder; omit everything else")
        result = resume_sft(resume, say)
    elif config is None:
        raise RequestError("give a config or a task: rollart sft my.toml --demonstrations FILE")
    else:
        tables = merged(_tables(config), {} if model is None else {"model": model})
        result = start_sft(override(tables, list(set_ or [])), list(demonstrations or []), out, say)
    if json:
        sys.stdout.write(msgspec.json.encode(result, enc_hook=str).decode() + "\n")
    else:
        say(f'train it with: rollart train {config or "CONFIG"} --set model="{result.model}"')


def _tables(config: str) -> dict[str, object]:
    from rollart.tasks.builtin import BUILT_IN  # late: it needs Gymnasium, which other commands do not

    if config in BUILT_IN and config not in presets():
        built_in = BUILT_IN[config]
        task = {"environment": built_in.factory, "max_turns": built_in.max_turns}
        return {**ONE_POOL, "name": config, "tasks": {config: task}}
    if ":" in config and not Path(config).exists():
        name = config.rpartition(":")[2].lower()
        return {**ONE_POOL, "name": name, "tasks": {name: {"environment": config}}}
    return dict(load_toml(config_file(config)))
