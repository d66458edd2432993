"""Composition of a real run from its config: the factory behind each port.

The only module that knows both the control plane and the backends. Nothing here imports torch: factories are given by
path and loaded by the worker that needs them.
"""

import importlib.util
import math
import os
import re
import secrets
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rollart.app.algorithm_trial import check_algorithm
from rollart.app.harbor_tasks import is_harbor, with_absolute_folder
from rollart.app.reward_workers import check_function, reward_workers, sees_group
from rollart.app.task_checks import check_kind, check_prompts, prompts_of
from rollart.backends.engines.checkpoint_config import ModelShape, read_shape
from rollart.backends.environments.codec import Codec
from rollart.backends.environments.sources import own_interpreter
from rollart.backends.stores.folder import FolderStore
from rollart.backends.stores.shared import SharedMemoryStore
from rollart.backends.trainers.checkpoint import CheckpointPlace
from rollart.config.pools import PoolSettings
from rollart.config.schema import RunConfig
from rollart.config.suggest import did_you_mean
from rollart.config.tasks import EPISODE_RETURN, TaskSettings
from rollart.config.training import LoraSettings
from rollart.control.environments import POOL as ENVIRONMENTS
from rollart.control.fleet import WorkerSpec
from rollart.control.pipeline import Parts
from rollart.control.rollout import OnTrajectoryEnd, ignore_trajectory
from rollart.control.trainer import POOL as TRAINER
from rollart.distributed.interpreter import check_interpreter
from rollart.policy.rewards import reward_plans
from rollart.ports.algorithm import advantage_of
from rollart.ports.factory import load
from rollart.ports.ranks import RankStarter
from rollart.ports.runtime import Runtime
from rollart.ports.sink import EventSink
from rollart.ports.weights import WeightStore
from rollart.tasks.libraries.names import LIBRARIES, library_of, resolve
from rollart.types.errors import ConfigError, RequestError
from rollart.types.messages import Role
from rollart.types.placement import ACCELERATOR, ANYWHERE, Labels, Needs

if TYPE_CHECKING:
    from rollart.distributed.ray_weights import RayWeightStore

ENGINES = {
    "torch": "rollart.backends.engines.torch_engine:TorchEngine",
    "vllm": "rollart.backends.engines.vllm:VllmEngine",
    "reference": "rollart.backends.engines.reference:ReferenceEngine",
}
TRAINER_FACTORY = "rollart.backends.trainers.torch_trainer:TorchTrainer"
ENVIRONMENT_HOST = "rollart.backends.environments.host:EnvironmentHost"
BYTE_CODEC = "rollart.backends.environments.codec:ByteCodec"
HF_CODEC = "rollart.backends.environments.hf_codec:HfCodec"


MAX_PROGRESS_INTERVAL_S = 1.0
"""Interval of engine progress reports; tokens sampled since the last one are lost if the engine dies."""
LARGEST_NUMBER_BYTES = 4
TENSOR_ENTRY_BYTES = 512
"""Upper bound on a tensor's size in the manifest."""
STORE_ROOM_BYTES = 2**20


def check_real(config: RunConfig) -> None:
    """Refuse configs that are complete enough for a simulation but not for a real run."""
    for name, task in config.tasks.items():
        check_kind(config, name)
        if task.environment and not task.python:  # else what it imports is there: `check_interpreters`
            _check_environment(f"tasks.{name}.environment", task)
        for index, reward in enumerate(task.all_rewards):
            check_function(f"tasks.{name}.rewards.{index}.function" if task.rewards else f"tasks.{name}.reward", reward)
    for name, pool in config.pools.items():
        if pool.python and not (Path(pool.python).is_file() and os.access(pool.python, os.X_OK)):
            raise ConfigError(
                f"pools.{name}.python",
                f"{pool.python!r} is not an executable file; give the path of an interpreter, such as "
                '".venv-vllm/bin/python"',
            )
    check_algorithm(config)
    if config.on_step:
        _check_factory("on_step", config.on_step)
    if config.codec:
        _check_factory("codec", config.codec)
    if not config.model:
        raise ConfigError(
            "model", "is missing; give a checkpoint folder, or [model.config] for a small one from scratch"
        )
    if isinstance(config.model, str) and not Path(config.model).is_dir():
        raise ConfigError("model", f"{config.model!r} is not a folder; give a local checkpoint, nothing is downloaded")
    _check_model(config)
    temperatures = {task.temperature for task in config.tasks.values()}
    if len(temperatures) > 1:
        raise ConfigError("tasks", f"all tasks of a run must share one temperature, not {sorted(temperatures)}")
    codec = None if is_cold_start(config) else codec_of(config)
    for name in config.tasks:
        check_prompts(config, name, codec)


def check_interpreters(config: RunConfig, *, processes: bool) -> None:
    """Refuse engines that cannot start because of their pool's interpreter or a missing vLLM.

    `processes`: workers run in their own processes. Every interpreter is started once, for a second or two.
    """
    _check_own_interpreters(config)
    checked = set()
    for name, pool in config.pools.items():
        needed = ("vllm",) if pool.engine == "vllm" else ()
        if not pool.python:
            if needed and importlib.util.find_spec("vllm") is None:
                raise ConfigError(
                    f"pools.{name}.engine",
                    f"vLLM is not installed for {sys.executable}; install it there, or name an interpreter that has "
                    f"it as pools.{name}.python (see docs/vllm.md)",
                )
            continue
        if not processes:
            raise ConfigError(
                f"pools.{name}.python",
                "workers are threads of the controller here and use its interpreter; use --runtime ray, or remove "
                "this key",
            )
        if (pool.python, needed) not in checked:
            try:
                check_interpreter(interpreter_of(pool), *needed)
            except RequestError as error:
                raise ConfigError(f"pools.{name}.python", str(error)) from error
            checked.add((pool.python, needed))


def _check_own_interpreters(config: RunConfig) -> None:
    """Refuse tasks whose environments cannot be played by the interpreter that they name. Every one is started once."""
    for name, task in config.tasks.items():
        if task.python:
            try:
                own_interpreter(name, hosted(task), slots=1).close()
            except RequestError as error:
                raise ConfigError(f"tasks.{name}.python", str(error)) from error


def interpreter_of(settings: PoolSettings | TaskSettings) -> str:
    """Absolute path of the interpreter of a pool or a task; empty for the controller's."""
    # Not resolved: the interpreter of a virtual environment is a symlink to another one.
    return str(Path(settings.python).absolute()) if settings.python else ""


def hosted(task: TaskSettings) -> TaskSettings:
    """Settings of a task as its workers get them, wherever they run: by factory path, and with an absolute path."""
    if is_harbor(task):
        task = with_absolute_folder(task)
    factory, settings = resolve(task.environment, task.environment_settings)
    python = interpreter_of(task)
    return task.model_copy(update={"environment": factory, "environment_settings": settings, "python": python})


def _check_environment(key: str, task: TaskSettings) -> None:
    """Refuse an environment that cannot be imported, or that its library does not have."""
    factory, settings = resolve(task.environment, task.environment_settings)
    if not library_of(task.environment):
        prefix = task.environment.partition(":")[0]
        try:
            load(factory)
        except RequestError as error:
            raise ConfigError(key, f"{error}{did_you_mean(prefix, [f'{name}:' for name in LIBRARIES])}") from error
        return
    try:
        load(factory)(**settings).close()
    except (RequestError, TypeError) as error:
        raise ConfigError(key, str(error)) from error


def _check_factory(key: str, path: str) -> None:
    try:
        load(path)
    except RequestError as error:
        raise ConfigError(key, str(error)) from error


def _wants_transcripts(config: RunConfig, task: TaskSettings) -> bool:
    """Whether a reward of the task, or the transcript store, reads transcripts of its episodes."""
    return config.transcripts_mb > 0 or any(reward.function != EPISODE_RETURN for reward in task.all_rewards)


def _check_model(config: RunConfig) -> None:
    if is_cold_start(config):
        return  # the run creates it to fit these tasks and this codec
    if isinstance(config.model, dict):
        vocabulary = codec_of(config).vocabulary
        size = config.model.get("config", {}).get("vocab_size")
        if not isinstance(size, int) or size < vocabulary:
            raise ConfigError("model.config.vocab_size", f"is {size}; the codec needs {vocabulary}")
    else:
        codec_of(config)
    for name, pool in config.pools.items():
        if pool.engine == "vllm" and isinstance(config.model, dict):
            raise ConfigError(
                f"pools.{name}.engine", "vllm reads the model's config from a folder; give a checkpoint as `model`"
            )
        if pool.engine == "torch":
            try:
                shape = read_shape(config.model)
            except RequestError as error:
                raise ConfigError(f"pools.{name}.engine", f"torch cannot serve this model: {error}") from error
            if isinstance(config.model, str):
                _check_weights(config.model, shape)


def _check_weights(folder: str, shape: ModelShape) -> None:
    from rollart.backends.engines.checkpoint_header import check_weights  # needs safetensors, as real runs do

    try:
        check_weights(Path(folder), shape)
    except RequestError as error:
        raise ConfigError("model", str(error)) from error


def is_cold_start(config: RunConfig) -> bool:
    """Whether the model is created at the start of the run."""
    return isinstance(config.model, dict) and "cold_start" in config.model


def codec_factory(config: RunConfig) -> tuple[str, dict[str, Any]]:
    """Factory path of a run's codec, and its arguments."""
    if config.codec and config.codec != HF_CODEC:
        return config.codec, {}
    if isinstance(config.model, str) and (config.codec or (Path(config.model) / "tokenizer.json").is_file()):
        return HF_CODEC, {"folder": config.model}
    return BYTE_CODEC, {}


def codec_of(config: RunConfig) -> Codec:
    factory, settings = codec_factory(config)
    codec: Codec = load(factory)(**settings)
    return codec


def baselines_of(config: RunConfig) -> dict[str, dict[str, float]]:
    """Scores of scripted policies on the held-out prompts of the run, for tasks that have scripts."""
    from rollart.tasks.builtin import baselines  # late: it needs Gymnasium, which simulations do not

    found = {}
    for name, task in config.tasks.items():
        source = prompts_of(config, name, held_out=True)
        prompts = [source.next() for _ in range(task.eval_episodes)]
        if prompts and task.environment:
            found[name] = baselines(task.environment, prompts, max_turns=task.max_turns, **task.environment_settings)
    return found


def real_parts(
    config: RunConfig,
    runtime: Runtime,
    sink: EventSink,
    store: WeightStore,
    checkpoints: Path | CheckpointPlace | None = None,
    on_trajectory_end: OnTrajectoryEnd = ignore_trajectory,
    rank_starter: RankStarter | None = None,
) -> Parts:
    """Parts of a real run; without a checkpoint folder, losing the trainer means starting over.

    `rank_starter` starts the ranks of a trainer that has several; by default they are child processes.
    """
    return Parts(
        runtime=runtime,
        sink=sink,
        workers=worker_specs(config, store, checkpoints, rank_starter),
        prompts={name: prompts_of(config, name, held_out=False) for name in config.tasks},
        eval_prompts={name: prompts_of(config, name, held_out=True) for name in config.tasks},
        rewards=reward_plans(config, sees_group),
        advantage=advantage_of(config.algorithm),
        stop_tokens=codec_of(config).stop_tokens,
        on_trajectory_end=on_trajectory_end,
    )


def worker_specs(
    config: RunConfig,
    store: WeightStore | None,
    checkpoints: Path | CheckpointPlace | None,
    rank_starter: RankStarter | None = None,
) -> list[WorkerSpec]:
    """Specs of all workers of a run; without a store, for display only."""
    return [
        *_engines(config, store),
        *_environments(config),
        *reward_workers(config, lambda cpus: _on(config, config.reward_pool, cpus=cpus)),
        _trainer(config, store, checkpoints, rank_starter),
    ]


def first_workers(config: RunConfig, *, least: bool = False) -> list[WorkerSpec]:
    """Specs of the workers that a run starts with, for display only. `least`: of those that it cannot do without."""
    engines = {name: bounds.min if least else bounds.first for name, bounds in config.elastic_pools().items()}
    return [
        spec
        for spec in worker_specs(config, None, None)
        if spec.role is not Role.ENGINE
        or spec.pool not in engines
        or int(spec.name.rpartition("/")[2]) < engines[spec.pool]
    ]


@contextmanager
def process_store(config: RunConfig, folder: Path) -> Iterator[WeightStore]:
    """Weight store for workers in other processes: in shared memory if the size of the model is known."""
    sizes = _version_sizes(config)
    if sizes is None:
        yield FolderStore(folder / "weights")
        return
    # Containers may share /dev/shm, and have processes with equal ids.
    name = f"train-{os.getpid()}-{secrets.token_hex(4)}"
    with SharedMemoryStore.create(name, slot_bytes=sizes.version, adapter_bytes=sizes.adapter) as store:
        yield store


@contextmanager
def cluster_store(config: RunConfig) -> "Iterator[RayWeightStore]":
    """Weight store for workers on the nodes of a cluster."""
    from rollart.distributed.ray_weights import ray_weights  # here: simulations need no Ray

    sizes = _version_sizes(config)
    if sizes is None:
        files = Path(config.model).glob("*.safetensors") if isinstance(config.model, str) else ()
        stored_bytes = sum(file.stat().st_size for file in files)
        if not stored_bytes:
            raise ConfigError("model", "its size is unknown, which a cluster needs; give a folder with safetensors")
        # Checkpoints hold two bytes per number or more, published versions four at the most.
        sizes = VersionBytes(2 * stored_bytes + STORE_ROOM_BYTES, 0)
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", config.name)
    run = f"{name}-{secrets.token_hex(6)}"
    with ray_weights(run, slot_bytes=sizes.version, adapter_bytes=sizes.adapter) as store:
        yield store


class VersionBytes(NamedTuple):
    """Upper bounds on the size of a full version, and of an adapter (0 if none is published)."""

    version: int
    adapter: int


def _version_sizes(config: RunConfig) -> VersionBytes | None:
    """None for an architecture known only to transformers."""
    try:
        tensors = read_shape(config.model).tensors()
    except RequestError:
        return None
    entry_bytes = max(1, config.trainer.ranks) * TENSOR_ENTRY_BYTES  # ranks publish shards
    nbytes = sum(math.prod(shape) * LARGEST_NUMBER_BYTES + entry_bytes for shape in tensors.values())
    return VersionBytes(nbytes + STORE_ROOM_BYTES, _adapter_bytes(config.trainer.lora, tensors.values()))


def _adapter_bytes(lora: LoraSettings | None, shapes: Iterable[tuple[int, ...]]) -> int:
    """Size of the largest adapter version for a model with these tensors; 0 if none is published."""
    if lora is None or lora.publish != "adapter":
        return 0
    # Factors are (rank, inputs) and (outputs, rank). After a resume their rank is twice that of the settings: those of
    # the checkpoint, which are in the full version, are subtracted (`Adapter.adapter_version`).
    factors = [2 * lora.rank * sum(shape) * LARGEST_NUMBER_BYTES for shape in shapes if len(shape) == 2]
    return sum(factors) + 2 * len(factors) * TENSOR_ENTRY_BYTES + STORE_ROOM_BYTES


def _engines(config: RunConfig, store: WeightStore | None) -> list[WorkerSpec]:
    shared = {
        "model": config.model,
        "store": store,
        "max_context": max(task.max_context for task in config.tasks.values()),
        "progress_interval_s": min(MAX_PROGRESS_INTERVAL_S, config.deadlines.engine_silent_s / 4),
    }
    return [
        WorkerSpec(
            f"engine/{name}/{index}",
            Role.ENGINE,
            name,
            ENGINES[pool.engine],
            {**shared, "pool": pool},
            pool.hardware or name,
            interpreter_of(pool),
            engine_needs(config, name),
        )
        for name, pool in config.pools.items()
        for index in range(pool.range.max)
    ]


def engine_needs(config: RunConfig, name: str) -> Needs:
    """What each engine of a pool reserves."""
    pool = config.pools[name]
    return Needs(
        pool.ranks if pool.gpu_share == 1 else pool.ranks * pool.gpu_share,
        pool.cpus,
        round(pool.memory_gb * 1e9),
        labels_of(pool),
        tuple(labels_of(config.pools[other]) for other in pool.fallback),
        name,
    )


def labels_of(pool: PoolSettings) -> Labels:
    """Labels of the nodes of a pool."""
    return pool.labels | ({ACCELERATOR: pool.accelerator} if pool.accelerator else {})


def _on(config: RunConfig, pool: str, *, gpus: float = 0, cpus: float) -> Needs:
    """Needs of a worker that prefers the nodes of a pool; empty = any node."""
    labels = labels_of(config.pools[pool]) if pool else {}
    return Needs(gpus, cpus, labels=labels, fallback=(ANYWHERE,), pool=pool)


def _environments(config: RunConfig) -> list[WorkerSpec]:
    specs = []
    codec, codec_settings = codec_factory(config)
    for name, task in config.tasks.items():
        sizes = [
            min(task.environments_per_worker, task.environments - first)
            for first in range(0, task.environments, task.environments_per_worker)
        ]
        for index, slots in enumerate(sizes):
            settings = {
                "task": name,
                "settings": hosted(task),
                "codec": codec,
                "codec_settings": codec_settings,
                "slots": slots,
                "transcripts": _wants_transcripts(config, task),
            }
            specs.append(
                WorkerSpec(
                    f"environment/{name}/{index}",
                    Role.ENVIRONMENT,
                    ENVIRONMENTS,
                    ENVIRONMENT_HOST,
                    settings,
                    needs=_on(config, task.environment_pool, cpus=task.environment_cpus),
                )
            )
    return specs


def _trainer(
    config: RunConfig,
    store: WeightStore | None,
    checkpoints: Path | CheckpointPlace | None,
    rank_starter: RankStarter | None,
) -> WorkerSpec:
    settings = {
        "model": config.model,
        "model_source": Path(config.model) if isinstance(config.model, str) else None,
        "store": store,
        "trainer": config.trainer,
        "algorithm": config.algorithm,
        "seed": config.seed,
        "temperature": next(iter(config.tasks.values())).temperature,
        "checkpoints": str(checkpoints.absolute()) if isinstance(checkpoints, Path) else checkpoints,
        "keep_checkpoints": config.keep_checkpoints,
        "rank_starter": rank_starter,
    }
    return WorkerSpec(
        "trainer/0",
        Role.TRAINER,
        TRAINER,
        TRAINER_FACTORY,
        settings,
        needs=rank_needs(config),
        ranks=max(1, config.trainer.ranks),
    )


def rank_needs(config: RunConfig) -> Needs:
    """What each rank of the trainer reserves."""
    trainer = config.trainer
    return _on(config, trainer.pool, gpus=trainer.gpu_share if trainer.device == "cuda" else 0, cpus=trainer.cpus)
