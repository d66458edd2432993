"""The Python API: tasks with classes and functions in place of their paths, and `run`.

What holds: `run` does exactly what `rollart train` does with the same config: same checks, same folder, same resume. It
raises what the command would say (`rollart.types.errors`), and never ends the process.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rollart.cli.naming import factory_path
from rollart.cli.running import RuntimeKind, Tables, carry_out, new_run, require, resumed_run
from rollart.config.base import Strict
from rollart.config.load import check, load_toml
from rollart.config.schema import RunConfig, TaskSettings
from rollart.config.suggest import did_you_mean
from rollart.observe.report import Report
from rollart.ports.factory import file_being_loaded
from rollart.types.errors import RequestError

ONE_POOL: Tables = {"pools": {"local": {}}}
"""What a run without a config begins with: one engine."""
TINY_MODEL: Tables = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
BYTE_VOCABULARY = 260


class Task(TaskSettings):
    """A task of a run: a `TaskSettings` whose environment and reward may be given as they are.

    `environment`: a class in the form of Gymnasium, in text, or of `rollart.TextEnvironment`; or whatever builds one.
    `reward`: a function from a `rollart.Score` to a number; without one, the sum of what the environment gave.
    They are found again by name in every worker, so both are of the top level of a file.
    """

    def __init__(
        self,
        environment: Callable[..., Any] | str,
        reward: Callable[..., float] | str | None = None,
        **settings: Any,
    ) -> None:
        named = {"environment": factory_path(environment), **settings}
        if reward is not None:
            named["reward"] = factory_path(reward)
        check(TaskSettings, named)
        super().__init__(**named)


class HeldOut(NamedTuple):
    """Mean reward on held-out episodes, in the first and in the last evaluation; None if no episode was scored."""

    before: float | None
    after: float | None


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a run."""

    folder: Path
    report: Report

    @property
    def held_out(self) -> dict[str, HeldOut]:
        """Of every task that was evaluated."""
        means: dict[str, list[float | None]] = {}
        for evaluation in self.report.evaluations:
            means.setdefault(evaluation.task, []).append(evaluation.mean_reward)
        return {task: HeldOut(values[0], values[-1]) for task, values in means.items()}


def run(
    config: Mapping[str, Any] | RunConfig | Path | str | None = None,
    *,
    out: Path | str | None = None,
    resume: Path | str | None = None,
    runtime: str = RuntimeKind.INLINE,
    **changes: Any,
) -> Result:
    """Train for real and give what came of it.

    `config` is a TOML file or its tables, `changes` are keys that add to it: `steps=20`, `batch={"group_size": 4}`,
    `tasks={"mine": rollart.Task(…)}`. `out` is the folder of the run, `resume` that of one to go on with.
    """
    _check_caller()
    kind = _runtime(runtime)
    require(kind)
    if resume is not None:
        if config is not None or out is not None:
            raise RequestError("resume takes the config and the folder of the run; leave config and out away")
        plan = resumed_run(Path(resume), lambda tables: merged(tables, changes))
    else:
        plan = new_run(merged(_tables(config), changes))
    return Result(*carry_out(plan, kind, None if out is None else Path(out)))


def tiny_model(vocabulary: int = BYTE_VOCABULARY) -> dict[str, Any]:
    """The `model` of a run: 0.1 M random weights, enough to see a task learn where chance earns some reward.

    `vocabulary` fits the codec that a run has by default, which is bytes.
    """
    return {"config": {**TINY_MODEL, "vocab_size": vocabulary}}


def merged(tables: Tables, changes: Tables) -> dict[str, Any]:
    """`tables` with those of `changes` laid over them, table by table; classes and functions become paths.

    >>> merged({"steps": 5, "batch": {"trajectories": 8, "group_size": 4}}, {"steps": 9, "batch": {"group_size": 2}})
    {'steps': 9, 'batch': {'trajectories': 8, 'group_size': 2}}
    """
    out = dict(tables)
    for key, value in changes.items():
        new, old = _plain(value), _plain(out.get(key))
        out[key] = merged(old, new) if isinstance(old, Mapping) and isinstance(new, Mapping) else new
    return {key: _plain(value) for key, value in out.items()}


def _plain(value: Any) -> Any:
    """As TOML would have it."""
    if isinstance(value, Strict):
        return value.model_dump(exclude_unset=True)
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    return factory_path(value) if callable(value) else value


def _tables(config: Mapping[str, Any] | RunConfig | Path | str | None) -> Tables:
    match config:
        case None:
            return ONE_POOL
        case RunConfig():
            return config.model_dump(exclude_unset=True)  # so that what is laid over it is checked with the rest
        case Mapping():
            return config
        case str() | Path():
            return load_toml(Path(config))
    raise RequestError(f"config is a {type(config).__name__}; give the path of a TOML file, its tables or a RunConfig")


def _runtime(name: str) -> RuntimeKind:
    try:
        return RuntimeKind(name)
    except ValueError:
        known = list(RuntimeKind)
        raise RequestError(
            f"runtime {name!r} does not exist{did_you_mean(name, known)}; there are {', '.join(known)}"
        ) from None


def _check_caller() -> None:
    """Who calls must be the user: a worker that loads the user's file would start a run inside the run."""
    file = file_being_loaded()
    if file is not None:
        raise RequestError(
            f"{file} calls rollart.run whenever it is loaded, and workers load it to find its classes. "
            'Put the call under: if __name__ == "__main__":'
        )
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RequestError(
        "rollart.run has an event loop of its own and was called inside another one; call it from a script, or with "
        "asyncio.to_thread"
    )
