"""Scenarios: a run's config and its simulated world, in one TOML file.

Everything outside the table `[sim]` is the config of the run, as for a real run; `[sim]` describes the model, the
hardware, the links and the workload. Mode and seed do not affect `[sim]`, so two runs of one scenario differ only in
what was asked to differ.
"""

import tomllib
from collections.abc import Sequence
from importlib import resources
from typing import Any

from pydantic import Field

from rollart.config.base import Strict
from rollart.config.load import check, override
from rollart.config.schema import RunConfig
from rollart.config.suggest import did_you_mean
from rollart.sim.hardware import HARDWARE, MODELS, Hardware, ModelProfile
from rollart.sim.workload import TaskProfile
from rollart.types.errors import ConfigError, RequestError
from rollart.types.messages import KvOnUpdate


class EngineModel(Strict):
    """Settings of every engine; its hardware is the class of its pool."""

    ranks: int = Field(default=1, gt=0)
    slots: int = Field(default=64, gt=0)
    max_context: int = Field(default=32768, gt=0)
    kv_on_update: KvOnUpdate = KvOnUpdate.RECOMPUTE
    pull_gb_s: float = Field(default=20.0, gt=0)
    progress_interval_s: float = Field(default=5.0, gt=0)
    prefix_hit: float = Field(default=1.0, ge=0, le=1)
    """Share of turns that find their session's prefix in the cache; the others recompute the whole context."""


class TrainerModel(Strict):
    """The training cluster."""

    hardware: str
    ranks: int = Field(default=1, gt=0)
    push_gb_s: float = Field(default=10.0, gt=0)


class RewardModel(Strict):
    """Where rewards run: on a fixed number of slots, or on serverless functions that scale to zero."""

    serverless: bool = True
    slots: int = Field(default=16, gt=0)
    cold_start_s: float = Field(default=0.0, ge=0)
    idle_s: float = Field(default=60.0, gt=0)


class NodeModel(Strict):
    """A node of a cluster that comes and goes. Without any, nothing is reserved and there is room for everything."""

    pool: str
    """The pool that it belongs to: its engines run here, and the trainer if that is its pool."""
    engines: int = Field(default=1, gt=0)
    """Engines that it has room for; the trainer takes as much as one."""
    from_s: float = Field(default=0.0, ge=0)
    """When it joins."""
    until_s: float | None = Field(default=None, gt=0)
    """When it is gone; by default it stays."""
    notice_s: float = Field(default=0.0, ge=0)
    """How long before that it drains; 0 = it dies without notice."""


class World(Strict):
    """The table `[sim]`."""

    description: str = ""
    model: str | ModelProfile
    hardware: dict[str, Hardware] = Field(default_factory=dict)
    """Hardware classes besides the built-in ones, by name."""
    engine: EngineModel = EngineModel()
    trainer: TrainerModel
    reward: RewardModel = RewardModel()
    tasks: dict[str, TaskProfile]
    nodes: tuple[NodeModel, ...] = ()
    """Nodes with room for engines; by default as many as it takes."""

    def model_profile(self) -> ModelProfile:
        if isinstance(self.model, ModelProfile):
            return self.model
        if self.model not in MODELS:
            raise ConfigError("sim.model", f"no model {self.model!r}{did_you_mean(self.model, MODELS)}")
        return MODELS[self.model]

    def hardware_class(self, name: str, path: str) -> Hardware:
        known = HARDWARE | self.hardware
        if name not in known:
            raise ConfigError(
                path, f"no hardware class {name!r}{did_you_mean(name, known)}; describe it in sim.hardware"
            )
        return known[name]


class Scenario(Strict):
    """A run and its world."""

    config: RunConfig
    world: World

    def check(self) -> None:
        """Refuse inconsistencies between the two halves."""
        self.world.model_profile()
        self.world.hardware_class(self.world.trainer.hardware, "sim.trainer.hardware")
        for name in self.config.hardware_classes():
            self.world.hardware_class(name, f"pools.{name}")
        for number, node in enumerate(self.world.nodes):
            if node.pool not in self.config.pools:
                raise ConfigError(
                    f"sim.nodes.{number}.pool", f"no pool {node.pool!r}{did_you_mean(node.pool, self.config.pools)}"
                )
        for task in self.config.tasks:
            if task not in self.world.tasks:
                raise ConfigError(f"sim.tasks.{task}", "the task has no workload; describe it in this table")
        for name, settings in self.config.tasks.items():
            if settings.max_context > self.world.engine.max_context:
                raise ConfigError(
                    f"tasks.{name}.max_context",
                    f"{settings.max_context} tokens do not fit an engine's {self.world.engine.max_context}; "
                    "lower it or raise sim.engine.max_context",
                )
        for task, profile in self.world.tasks.items():
            if task not in self.config.tasks:
                raise ConfigError(f"sim.tasks.{task}", f"no such task{did_you_mean(task, self.config.tasks)}")
            rewards = [reward.label for reward in self.config.tasks[task].all_rewards]
            for key in ("group_rewards", "part_rewards"):
                for name in getattr(profile, key):
                    if name not in rewards:
                        raise ConfigError(
                            f"sim.tasks.{task}.{key}",
                            f"there is no reward {name!r}{did_you_mean(name, rewards)}; it has {', '.join(rewards)}",
                        )


def scenario_names() -> list[str]:
    """Names of the scenarios that come with rollart."""
    folder = resources.files("rollart.sim") / "scenarios"
    return sorted(item.name.removesuffix(".toml") for item in folder.iterdir() if item.name.endswith(".toml"))


def load_scenario(name: str, assignments: Sequence[str] = ()) -> Scenario:
    """Load a scenario that comes with rollart, with `key=value` assignments applied."""
    if name not in scenario_names():
        raise RequestError(
            f"no scenario {name!r}{did_you_mean(name, scenario_names())}; there are: {', '.join(scenario_names())}"
        )
    text = (resources.files("rollart.sim") / "scenarios" / f"{name}.toml").read_text(encoding="utf-8")
    return parse_scenario(tomllib.loads(text), assignments)


def parse_scenario(data: dict[str, Any], assignments: Sequence[str] = ()) -> Scenario:
    """Validate tables as a scenario."""
    data = override(data, assignments)
    world = data.pop("sim", None)
    if world is None:
        raise ConfigError("sim", "missing: a scenario describes its world in the table [sim]")
    try:
        checked = check(World, world)
    except ConfigError as error:
        raise ConfigError(f"sim.{error.path}" if error.path else "sim", error.problem) from None
    scenario = Scenario(config=check(RunConfig, data), world=checked)
    scenario.check()
    return scenario
