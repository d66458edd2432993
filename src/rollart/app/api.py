"""The Python API: `run` and its result. Tasks are in `app.task`.

Invariants: `run` does exactly what `rollart train` does with the same config: same checks, same folder, same resume. It
raises the errors that the command would print (`rollart.types.errors`), and never exits the process.
"""

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rollart.app.checkpoints import newest_folder
from rollart.app.interruption import in_own_thread
from rollart.app.naming import factory_path
from rollart.app.running import RuntimeKind, Tables, carry_out, new_run, read_config, require, resumed_run, say
from rollart.app.sft import SftResult, resume_sft, start_sft
from rollart.app.step_callback import StepCallback, check_callback
from rollart.app.task import plain
from rollart.config.load import load_toml
from rollart.config.schema import RunConfig
from rollart.config.suggest import did_you_mean
from rollart.observe.report import Report
from rollart.ports.factory import LOCAL, SESSION, file_being_loaded
from rollart.types.errors import RequestError
from rollart.types.journal import EvalEnded

ONE_POOL: Tables = {"pools": {"local": {}}}
"""Base of a run without a config: one engine."""
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
Source = str | Path | Callable[[Sequence[str], random.Random], str]
"""Demonstrations: a file, the folder of a run, or a player."""


class HeldOut(NamedTuple):
    """Mean reward on held-out episodes (mean@k), in the first and in the last evaluation; None if none was scored."""

    before: float | None
    after: float | None
    pass_before: Mapping[int, float]
    """pass@k by k in the first evaluation; empty if there is one attempt at each prompt (`eval_samples`)."""
    pass_after: Mapping[int, float]

    def __repr__(self) -> str:
        """Without the fields that are empty."""
        given = [f"{name}={value!r}" for name, value in zip(self._fields, self, strict=True) if value != {}]
        return f"HeldOut({', '.join(given)})"


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of a run."""

    folder: Path
    report: Report
    checkpoint: Path | None = None
    """Folder of the trained model, loadable with `AutoModelForCausalLM.from_pretrained`; with LoRA, of the adapter."""

    @property
    def held_out(self) -> dict[str, HeldOut]:
        """Scores of every task that was evaluated."""
        rounds: dict[str, list[EvalEnded]] = {}
        for evaluation in self.report.evaluations:
            rounds.setdefault(evaluation.task, []).append(evaluation)
        return {
            task: HeldOut(each[0].mean_reward, each[-1].mean_reward, _by_k(each[0]), _by_k(each[-1]))
            for task, each in rounds.items()
        }


def run(
    config: Mapping[str, Any] | RunConfig | Path | str | None = None,
    *,
    out: Path | str | None = None,
    resume: Path | str | None = None,
    runtime: str = RuntimeKind.INLINE,
    address: str | None = None,
    on_step: StepCallback | str | None = None,
    **changes: Any,
) -> Result:
    """Train and return the outcome.

    `config` is a TOML file or its tables; `changes` override its keys: `steps=20`, `batch={"group_size": 4}`,
    `tasks={"mine": rollart.Task(…)}`. `out` is the folder of the run, `resume` that of a run to continue. `address` is
    that of a Ray cluster to run on (`auto`, or HOST:PORT of its head). `on_step` is called in this process with the
    figures of every step, and ends the run by returning `rollart.Stop`; it may be any function, also a local one.
    """
    _check_caller()
    kind = RuntimeKind.RAY if address is not None else _runtime(runtime)
    require(kind)
    callback = None
    if isinstance(on_step, str):
        changes["on_step"] = on_step
    elif on_step is not None:
        callback = check_callback(on_step)
    if resume is not None:
        if config is not None or out is not None:
            raise RequestError("resume uses the config and the folder of the run; omit config and out")
        plan = resumed_run(Path(resume), lambda tables: merged(tables, changes))
    else:
        plan = new_run(merged(_tables(config), changes))
    _check_processes(plan.config, kind)
    place = None if out is None else Path(out)
    if _in_event_loop():
        folder, report = in_own_thread(say, lambda stop: carry_out(plan, kind, place, None, stop, address, callback))
    else:
        folder, report = carry_out(plan, kind, place, address=address, on_step=callback)
    return Result(folder, report, newest_folder(read_config(folder), folder))


def sft(
    config: Mapping[str, Any] | RunConfig | Path | str | None = None,
    *,
    demonstrations: Source | Sequence[Source] | Mapping[str, Source] = (),
    out: Path | str | None = None,
    resume: Path | str | None = None,
    **changes: Any,
) -> SftResult:
    """Train on demonstrations and return the outcome; its `model` is that of a run.

    `demonstrations`: JSON-lines files, folders of runs, or players, which are functions; by task, if there are
    several: `{"math": player}`. `config` and `changes` as in `run`; the settings are `sft={"steps": 200}`. `resume` is
    the folder of a training to continue.
    """
    _check_caller()
    require(RuntimeKind.INLINE)
    if resume is not None:
        if config is not None or out is not None or demonstrations or changes:
            raise RequestError("resume uses the config and the demonstrations of the folder; omit everything else")
        return resume_sft(Path(resume), say)
    match demonstrations:
        case Mapping():
            sources = [f"{task}={_source(each)}" for task, each in demonstrations.items()]
        case str() | Path():
            sources = [_source(demonstrations)]
        case Sequence():
            sources = [_source(each) for each in demonstrations]
        case _:
            sources = [_source(demonstrations)]
    return start_sft(merged(_tables(config), changes), sources, None if out is None else Path(out), say)


def _source(demonstrations: Source) -> str:
    return factory_path(demonstrations) if callable(demonstrations) else str(demonstrations)


def tiny_model(vocabulary: int = BYTE_VOCABULARY) -> dict[str, Any]:
    """A `model` of 0.1 M random weights, enough to learn a task that random play sometimes solves.

    `vocabulary` defaults to that of the default codec, which is bytes.
    """
    return {"config": {**TINY_MODEL, "vocab_size": vocabulary}}


def merged(tables: Tables, changes: Tables) -> dict[str, Any]:
    """Merge `changes` into `tables`, table by table; classes and functions become factory paths.

    >>> merged({"steps": 5, "batch": {"trajectories": 8, "group_size": 4}}, {"steps": 9, "batch": {"group_size": 2}})
    {'steps': 9, 'batch': {'trajectories': 8, 'group_size': 2}}
    """
    out = dict(tables)
    for key, value in changes.items():
        new, old = plain(value), plain(out.get(key))
        out[key] = merged(old, new) if isinstance(old, Mapping) and isinstance(new, Mapping) else new
    return {key: plain(value) for key, value in out.items()}


def _by_k(evaluation: EvalEnded) -> dict[int, float]:
    return {int(k): value for k, value in evaluation.pass_at.items()}


def _tables(config: Mapping[str, Any] | RunConfig | Path | str | None) -> Tables:
    match config:
        case None:
            return ONE_POOL
        case RunConfig():
            return config.model_dump(exclude_unset=True)  # so that it is checked together with the changes
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
    """Refuse a call from a worker that imports the user's file: it would start a run inside the run."""
    file = file_being_loaded()
    if file is not None:
        raise RequestError(
            f"{file} calls rollart.run whenever it is loaded, and workers load it to find its classes. "
            'Put the call under: if __name__ == "__main__":'
        )


def _in_event_loop() -> bool:
    """Whether the caller's thread runs an event loop, as it does in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _check_processes(config: RunConfig, runtime: RuntimeKind) -> None:
    """Refuse notebook classes if workers are processes, which cannot import them."""
    if runtime is RuntimeKind.INLINE:
        return
    factories = [task.environment for task in config.tasks.values()]
    factories += [reward.function for task in config.tasks.values() for reward in task.all_rewards]
    factories.append(config.algorithm.loss.factory())
    factories += [tool for task in config.tasks.values() for tool in task.tools if isinstance(tool, str)]
    for path in (*factories, config.codec):
        place, _, name = path.rpartition(":")
        if place == LOCAL:
            raise RequestError(
                f"{name.partition('/')[0]} is a lambda or defined inside a function, and workers that are processes "
                'cannot find it there. Use runtime="inline", or define it at the top level of a file.'
            )
        if place == SESSION:
            raise RequestError(
                f"{name} was defined in a notebook or an interactive session, and workers that are processes cannot "
                'find it there. Use runtime="inline", or write it to a file (in a notebook: %%writefile tasks.py) and '
                "import it."
            )
