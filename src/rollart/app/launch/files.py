"""The files of a run that go with its manifest: the config, and the user's modules that the config names."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollart.config.schema import RunConfig
from rollart.types.errors import RequestError

MAX_BYTES = 900_000
"""A ConfigMap has room for 1 MiB, with its names."""


def named_files(config: RunConfig) -> list[str]:
    """Files that factories and prompts name, relative to the folder of the command.

    >>> from rollart.config.load import check
    >>> tasks = {"maze": {"environment": "maze.py:Maze", "prompts": "prompts.jsonl"}}
    >>> named_files(check(RunConfig, {"tasks": tasks, "pools": {"local": {}}}))
    ['maze.py', 'prompts.jsonl']
    """
    factories = [config.codec]
    paths = []
    for task in config.tasks.values():
        factories += [task.environment, *(reward.function for reward in task.all_rewards)]
        factories += [tool for tool in task.tools if isinstance(tool, str)]
        paths += [given for given in (task.prompts, task.eval_prompts) if isinstance(given, str)]
    modules = [factory.rpartition(":")[0] for factory in factories]
    found = [module for module in modules if module.endswith((".py", ".toml"))] + [path for path in paths if path]
    return list(dict.fromkeys(found))


def read_files(names: Sequence[str]) -> dict[str, str]:
    """Text by name; refuses what a ConfigMap cannot hold."""
    texts: dict[str, str] = {}
    for name in names:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise RequestError(f"{name} lies outside of this folder; put it into the image and name that with --code")
        try:
            texts[name] = Path(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(
                f"{name} cannot go with the manifest ({error}); put it into the image and name that with --code"
            ) from error
    total = sum(len(text.encode()) for text in texts.values())
    if total > MAX_BYTES:
        raise RequestError(
            f"the config and its files have {total / 1e6:.1f} MB, more than a ConfigMap holds; put the files into the "
            "image and name their folder with --code"
        )
    return texts


def keys_of(names: Sequence[str]) -> dict[str, Any]:
    """By name of a file: its key in a ConfigMap, which has no folders.

    >>> keys_of(["my.toml", "envs/maze.py"])
    {'my.toml': 'my.toml', 'envs/maze.py': 'envs_maze.py'}
    """
    return {name: name.replace("/", "_") for name in names}
