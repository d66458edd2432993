"""First split of devices between training and each pool of engines, by cost.

With r ranks, n_p engines in pool p, and per training step the cost of training C_t (rank-seconds) and of rollout C_p
(seconds of one engine of pool p that does all of it):

    train = C_t / r        rollout = 1 / Σ n_p / C_p        step = max(train, rollout), or their sum without overlap

The split with the shortest step is chosen among those that fit, on empty nodes; of equally good ones, that with the
fewest ranks and engines. Declared numbers are kept. Costs are measured in an earlier session of the run
(trainer-seconds and busy engine-seconds per step), else estimated from data sheets, with half of what the limits of the
tasks allow as the length of a trajectory:

    C_t = 6 · P · tokens / training FLOP/s                                 8 · P with gradient checkpointing
    C_p = 2 · P · prompt tokens / prefill FLOP/s + sampled tokens · b · P / (batch · bytes/s)
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rollart.config.elasticity import EngineRange
from rollart.config.pools import PoolSettings
from rollart.config.schema import RunConfig
from rollart.config.tasks import AUTO
from rollart.policy.memory import BYTES, ModelSize
from rollart.policy.placement import Wait, decide, decide_ranks
from rollart.types.accelerators import (
    ACCELERATORS,
    BANDWIDTH_EFFICIENCY,
    CORE,
    PREFILL_EFFICIENCY,
    TRAIN_EFFICIENCY,
    UNKNOWN,
    Accelerator,
)
from rollart.types.placement import Needs, Node

EQUAL = 0.999
"""A split replaces another only if its step takes less than this fraction of the other's."""
MAX_RANKS = 64


def chooses(pool: PoolSettings) -> bool:
    """Whether the split chooses the number of engines at the start."""
    return pool.engines == AUTO or (isinstance(pool.engines, EngineRange) and pool.engines.start is None)


class Costs(NamedTuple):
    """Cost of a training step. `rollout`: by pool, if one engine of it did all."""

    training: float
    rollout: Mapping[str, float]
    measured: bool


class Split(NamedTuple):
    """Ranks and engines to start with, and the predicted seconds of a step."""

    ranks: int
    engines: Mapping[str, int]
    train_s: float
    rollout_s: float
    step_s: float
    fits: bool = True
    """Whether there are devices for all of it."""


def device_of(needs: Needs, accelerator: str) -> Accelerator:
    """Device of a worker: the accelerator of its GPUs, or a CPU core."""
    return ACCELERATORS.get(accelerator, UNKNOWN) if needs.gpus else CORE


class Tokens(NamedTuple):
    """Tokens of a training step."""

    sampled: float
    prompt: float


def tokens_per_step(config: RunConfig) -> Tokens:
    """Half of what the limits of the tasks allow."""
    sampled = prompt = 0.0
    for name, groups in config.groups_per_batch().items():
        task, members = config.tasks[name], groups * config.batch.group_size
        most = min(task.max_context, 2 * task.max_turns * task.max_turn_tokens)
        own = min(task.max_turns * task.max_turn_tokens, most)
        sampled += members * own / 2
        prompt += members * (most - own / 2) / 2
    return Tokens(sampled, prompt)


def estimated(config: RunConfig, model: ModelSize, needs: Mapping[str, Needs], trainer: Needs) -> Costs:
    """Costs from data sheets. `needs` are those of one engine of each pool."""
    tokens = tokens_per_step(config)
    device = device_of(trainer, config.pools[config.trainer.pool].accelerator if config.trainer.pool else "")
    per_token = (8 if config.trainer.gradient_checkpointing else 6) * model.parameters
    units = trainer.gpus or max(trainer.cpus, 1.0)
    training = per_token * sum(tokens) * config.algorithm.epochs / (device.tflops * 1e12 * TRAIN_EFFICIENCY * units)
    episodes = sum(task.environments for task in config.tasks.values())
    rollout = {}
    for name, each in needs.items():
        pool = config.pools[name]
        device, units = device_of(each, pool.accelerator), each.gpus or max(each.cpus, 1.0)
        batch = max(1, min(pool.slots, episodes))
        flops = device.tflops * 1e12 * PREFILL_EFFICIENCY * units
        read_s = BYTES[pool.dtype] * model.parameters / (device.tb_s * 1e12 * BANDWIDTH_EFFICIENCY * units)
        token_s = max(read_s / batch, 2 * model.parameters / flops)
        rollout[name] = 2 * model.parameters * tokens.prompt / flops + tokens.sampled * token_s
    return Costs(training, rollout, measured=False)


def best_split(
    config: RunConfig,
    costs: Costs,
    needs: Mapping[str, Needs],
    trainer: Needs,
    nodes: Sequence[Node],
    least_ranks: int = 1,
) -> Split:
    """The split with the shortest step on these nodes, or the declared and minimum numbers if those do not fit.

    `least_ranks`: ranks below which the trainer's memory does not suffice.
    """
    automatic = not config.trainer.ranks
    most = min(MAX_RANKS, max(least_ranks, config.batch.trajectories // config.algorithm.minibatches))
    choices = range(least_ranks, most + 1) if automatic else [config.trainer.ranks]
    best: Split | None = None
    for ranks in choices:
        room = _Room(nodes)
        if not room.take_ranks(trainer, ranks):
            break
        split = _fill(config, costs, needs, ranks, room)
        if split is not None and (best is None or split.step_s < EQUAL * best.step_s):
            best = split
    if best is not None:
        return best
    engines = {name: _least(config.pools[name]) for name in needs}
    return _split(config, costs, config.trainer.ranks or least_ranks, engines)._replace(fits=False)


def _least(pool: PoolSettings) -> int:
    """Engines that a split has at least."""
    return pool.range.min if chooses(pool) else pool.range.first


def _fill(config: RunConfig, costs: Costs, needs: Mapping[str, Needs], ranks: int, room: "_Room") -> Split | None:
    """Greedy fill beside this many ranks: the minimum of engines, then one by one by speed per device."""
    bounds = {name: config.pools[name].range for name in needs}
    free = [name for name in needs if chooses(config.pools[name])]
    engines = {}
    for name, each in needs.items():
        engines[name] = _least(config.pools[name])
        for _ in range(engines[name]):
            if not room.take(each):
                return None
    now = _split(config, costs, ranks, engines)
    while True:
        fitting = [name for name in free if engines[name] < bounds[name].max and room.fits(needs[name])]
        if not fitting:
            return now
        chosen = min(fitting, key=lambda name: costs.rollout[name] * (needs[name].gpus or 1))
        more = {**engines, chosen: engines[chosen] + 1}
        then = _split(config, costs, ranks, more)
        if then.step_s > EQUAL * now.step_s:
            return now
        room.take(needs[chosen])
        engines, now = more, then


def _split(config: RunConfig, costs: Costs, ranks: int, engines: Mapping[str, int]) -> Split:
    train_s = costs.training / ranks
    speed = math.fsum(count / max(costs.rollout[name], 1e-12) for name, count in engines.items())
    rollout_s = 1.0 / speed if speed else math.inf
    step_s = max(train_s, rollout_s) if config.mode_settings.overlap else train_s + rollout_s
    return Split(ranks, dict(engines), train_s, rollout_s, step_s)


class _Room:
    """Empty nodes that are being filled."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = [
            Node(node.id, node.address, node.labels, node.total, dict(node.total), node.draining) for node in nodes
        ]

    def fits(self, needs: Needs) -> bool:
        return not isinstance(decide(needs, self._nodes), Wait)

    def take(self, needs: Needs) -> bool:
        found = decide(needs, self._nodes)
        if isinstance(found, Wait):
            return False
        self._fill(needs, found.labels)
        return True

    def take_ranks(self, needs: Needs, ranks: int) -> bool:
        found = decide_ranks(needs, ranks, self._nodes)
        if isinstance(found, Wait):
            return False
        for labels in found.labels:
            self._fill(needs, labels)
        return True

    def _fill(self, needs: Needs, labels: Mapping[str, str]) -> None:
        node = next(
            node
            for node in self._nodes
            if all(node.labels.get(key) == value for key, value in labels.items())
            and all(node.free.get(name, 0.0) >= amount for name, amount in needs.resources.items())
        )
        for name, amount in needs.resources.items():
            node.free[name] -= amount
