"""First split of a run's devices: resolves `auto` in a config, and shows the arithmetic.

The split itself is `policy.devices`, the memory `policy.memory`; here are the nodes, the model and earlier figures.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rollart.app.compose import engine_needs, rank_needs
from rollart.app.run_folder import JOURNAL, write_whole
from rollart.backends.engines.checkpoint_config import ModelShape, read_shape
from rollart.config.elasticity import AUTO_ENGINES, EngineRange
from rollart.config.schema import RunConfig
from rollart.config.tasks import AUTO
from rollart.control.trainer import POOL as TRAINER
from rollart.distributed.node_probe import free_memory_bytes, gpu_count
from rollart.observe.journal import fold_journal, read_since_snapshot
from rollart.observe.report import Report
from rollart.policy.devices import MAX_RANKS, Costs, Split, best_split, chooses, device_of, estimated
from rollart.policy.memory import ModelSize, Part, engine_memory, total, trainer_memory
from rollart.types.errors import RequestError
from rollart.types.journal import TimeUse
from rollart.types.placement import Needs, Node

DEVICES = "devices.json"
"""The split that a session of a run started with."""
UNKNOWN_MODEL = ModelSize(1_000_000, 2, 128, 512, 512, 512)
"""Stands for a model whose shape is not known before the run, in costs; its memory is not estimated."""


class _Written(msgspec.Struct, frozen=True):
    ranks: int
    engines: dict[str, int]


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of one worker of a kind, and what it has; None if that is unknown."""

    who: str
    parts: list[Part]
    limit: int | None

    @property
    def nbytes(self) -> int:
        return total(self.parts)

    @property
    def fits(self) -> bool:
        return self.limit is None or self.nbytes <= self.limit


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """The resolved config, and what it was resolved from."""

    config: RunConfig
    split: Split
    costs: Costs
    memory: list[Memory]
    """Empty if the shape of the model is not known."""
    chosen: bool
    """Whether anything was left to the split."""

    def sentence(self) -> str:
        engines = ", ".join(f"{count} of {name}" for name, count in self.split.engines.items())
        how = "measured" if self.costs.measured else "estimated"
        return (
            f"devices: {self.split.ranks} for training, engines: {engines}; a step takes {self.split.train_s:.3g} s of "
            f"training and {self.split.rollout_s:.3g} s of rollout ({how})"
            + ("" if self.split.fits else "; that is more than there are devices")
        )


def plan_devices(config: RunConfig, nodes: Sequence[Node] | None, earlier: Path | None = None) -> DevicePlan:
    """The split of a run on these nodes, or on this machine; `earlier` is the folder of a run that is resumed."""
    model = _model_size(config)
    needs = {name: engine_needs(config, name) for name, pool in config.pools.items() if pool.range.max}
    trainer = rank_needs(config)
    if nodes is None:
        nodes = [_this_machine()]
        gpus = nodes[0].total["GPU"] > 0
        needs = {name: _here(each, gpus=gpus) for name, each in needs.items()}
        trainer = _here(trainer, gpus=gpus)
    costs = _measured(config, earlier) or estimated(config, model or UNKNOWN_MODEL, needs, trainer)
    least_ranks = 1 if model is None or config.trainer.ranks else _least_ranks(model, config, trainer, nodes)
    chosen = not config.trainer.ranks or any(chooses(pool) for pool in config.pools.values())
    split = best_split(config, costs, needs, trainer, nodes, least_ranks)
    resolved = _resolved(config, split)
    memory = [] if model is None else _memory(model, resolved, needs, trainer, nodes)
    return DevicePlan(resolved, split, costs, memory, chosen)


def leave_split(folder: Path, plan: DevicePlan) -> None:
    """Record the split, so that the figures of this session can be read by the next."""
    written = _Written(plan.split.ranks, dict(plan.split.engines))
    write_whole(folder / DEVICES, msgspec.json.encode(written) + b"\n")


def _resolved(config: RunConfig, split: Split) -> RunConfig:
    pools = {}
    for name, pool in config.pools.items():
        if chooses(pool):
            bounds, start = pool.range, split.engines[name]
            most = max(AUTO_ENGINES, 4 * start) if pool.engines == AUTO else bounds.max
            pool = pool.model_copy(update={"engines": EngineRange(min=bounds.min, max=most, start=start)})
        pools[name] = pool
    trainer = config.trainer.model_copy(update={"ranks": split.ranks})
    return config.model_copy(update={"pools": pools, "trainer": trainer})


def _model_size(config: RunConfig) -> ModelSize | None:
    try:
        shape = read_shape(config.model)
    except RequestError:
        return None
    return size_of(shape)


def size_of(shape: ModelShape) -> ModelSize:
    """What costs depend on of a model; a tied output head is counted once."""
    parameters = sum(math.prod(each) for each in shape.tensors().values())
    if shape.tied:
        parameters -= shape.vocabulary * shape.hidden
    kv_bytes = 4 * shape.layers * shape.kv_heads * shape.head_dim
    return ModelSize(parameters, shape.layers, shape.hidden, shape.intermediate, shape.vocabulary, kv_bytes)


def _this_machine() -> Node:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    resources = {"CPU": float(cores), "GPU": float(gpu_count()), "memory": float(free_memory_bytes() or math.inf)}
    return Node("", "this machine", {}, resources, dict(resources))


def _here(needs: Needs, *, gpus: bool) -> Needs:
    """What a worker takes of this machine, whose kind does not matter."""
    return msgspec.structs.replace(needs, labels={}, fallback=(), gpus=needs.gpus if gpus else 0)


def _limit(config: RunConfig, needs: Needs, pool: str, nodes: Sequence[Node]) -> int | None:
    """Bytes that a worker may take: of its share of one GPU, of its reservation, or of the largest node."""
    if needs.gpus:
        accelerator = config.pools[pool].accelerator if pool else ""
        share = min(1.0, needs.gpus)
        return round(device_of(needs, accelerator).memory_gb * 1e9 * share) or None
    if needs.memory_bytes:
        return needs.memory_bytes
    found = max((node.total.get("memory", 0.0) for node in nodes), default=0.0)
    return round(found) if 0.0 < found < math.inf else None


def _least_ranks(model: ModelSize, config: RunConfig, trainer: Needs, nodes: Sequence[Node]) -> int:
    limit = _limit(config, trainer, config.trainer.pool, nodes)
    if limit is None:
        return 1
    for ranks in range(1, MAX_RANKS + 1):
        if total(trainer_memory(model, config, ranks)) <= limit:
            return ranks
    parts = trainer_memory(model, config, MAX_RANKS)
    needed = ", ".join(f"{part.name} {part.nbytes / 1e9:.3g} GB" for part in parts)
    raise RequestError(
        f"training does not fit: even with {MAX_RANKS} ranks each needs {total(parts) / 1e9:.3g} GB ({needed}), and "
        f"has {limit / 1e9:.3g} GB; lower trainer.token_budget, or set trainer.gradient_checkpointing"
    )


def _memory(
    model: ModelSize, config: RunConfig, needs: Mapping[str, Needs], trainer: Needs, nodes: Sequence[Node]
) -> list[Memory]:
    kinds = [
        Memory(f"engine of {name}", engine_memory(model, config.pools[name]), _limit(config, each, name, nodes))
        for name, each in needs.items()
    ]
    limit = _limit(config, trainer, config.trainer.pool, nodes)
    return [*kinds, Memory("rank of the trainer", trainer_memory(model, config, config.trainer.ranks), limit)]


def _measured(config: RunConfig, earlier: Path | None) -> Costs | None:
    """Costs of an earlier session; None if it does not tell those of every pool."""
    if earlier is None or not (earlier / JOURNAL).is_file() or not (earlier / DEVICES).is_file():
        return None
    try:
        ranks = msgspec.json.decode((earlier / DEVICES).read_bytes(), type=_Written).ranks
    except msgspec.MsgspecError:
        return None  # damaged: the costs are estimated again
    if next(read_since_snapshot(earlier / JOURNAL), None) is None:
        return None  # killed before any event was durable
    report = fold_journal(earlier / JOURNAL)[1].finish()[1]
    if report is None or not report.steps:
        return None
    training = ranks * report.pools.get(TRAINER, {}).get(TimeUse.BUSY, 0.0) / report.steps
    rollout = {name: _of_all_work(report, config, name) for name, pool in config.pools.items() if pool.range.max}
    if not training or not all(rollout.values()):
        return None
    return Costs(training, rollout, measured=True)


def _of_all_work(report: Report, config: RunConfig, pool: str) -> float:
    """Busy engine-seconds per step of a pool, as if it had served all turns; 0 if it served none."""
    hardware = config.pools[pool].hardware or pool
    turns = sum(sum(classes.values()) for classes in report.placements.values())
    own = sum(classes.get(hardware, 0) for classes in report.placements.values())
    busy_s = report.pools.get(pool, {}).get(TimeUse.BUSY, 0.0) / report.steps
    return busy_s * turns / own if own else 0.0
