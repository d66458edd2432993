"""Run a scenario: the real control plane, in virtual time, over modelled workers."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from rollart.control.environments import POOL as ENVIRONMENTS
from rollart.control.fleet import WorkerSpec
from rollart.control.pipeline import Parts, run_pipeline
from rollart.control.rewards import POOL as REWARD
from rollart.control.trainer import POOL as TRAINER
from rollart.observe.journal import MemoryJournal
from rollart.policy.rewards import reward_plans
from rollart.ports.algorithm import advantage_of
from rollart.ports.prompts import PromptSource
from rollart.ports.sink import EventSink
from rollart.sim.checkpoints import SimCheckpoints
from rollart.sim.loop import run_virtual
from rollart.sim.nodes import needs_of
from rollart.sim.prompts import CountingPrompts
from rollart.sim.runtime import VirtualRuntime
from rollart.sim.scenario import Scenario
from rollart.sim.store import SimStore
from rollart.types.errors import RollartError
from rollart.types.journal import JournalEvent
from rollart.types.messages import Role
from rollart.types.placement import NOTHING


class Simulated(NamedTuple):
    """A finished run: its journal, unless the caller passed a sink, and the error that stopped it, if any."""

    events: list[JournalEvent]
    error: RollartError | None


def simulate(scenario: Scenario, sink: EventSink | None = None) -> Simulated:
    """Run to the end in virtual time. With a `sink`, the journal goes there instead of the returned list."""
    journal = MemoryJournal()
    error: RollartError | None = None

    async def main() -> None:
        await run_pipeline(scenario.config, parts(scenario, journal if sink is None else sink))

    with _rare_collections():
        try:
            run_virtual(main())
        except RollartError as stopped:
            error = stopped
    return Simulated(journal.events, error)


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Run the cyclic garbage collector rarely, and restore its thresholds afterwards.

    A simulation creates millions of objects with hardly a cycle among them: at the default thresholds the collector
    takes a tenth of a run over 2,048 trajectories, and more of a larger one, to find next to nothing. It stays enabled
    because a trajectory that ends by an exception does leave a cycle.
    """
    before = gc.get_threshold()
    gc.set_threshold(100_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def parts(scenario: Scenario, journal: EventSink, checkpoints: SimCheckpoints | None = None) -> Parts:
    """The simulated world, behind the ports. Must be built inside the running loop."""
    store = SimStore()
    return Parts(
        runtime=VirtualRuntime(scenario.world.nodes),
        sink=journal,
        workers=[
            *_engines(scenario, store),
            *_environments(scenario),
            *_rewards(scenario),
            _trainer(scenario, store, checkpoints or SimCheckpoints()),
        ],
        prompts=_prompts(scenario, held_out=False),
        eval_prompts=_prompts(scenario, held_out=True),
        rewards=reward_plans(
            scenario.config, lambda task, reward: reward.label in scenario.world.tasks[task].group_rewards
        ),
        advantage=advantage_of(scenario.config.algorithm),
    )


def _prompts(scenario: Scenario, *, held_out: bool) -> dict[str, PromptSource]:
    """Disjoint training and held-out prompts, different for every seed of the run."""
    first = (2 * scenario.config.seed + int(held_out)) << 32
    return {task: CountingPrompts(task, first) for task in scenario.config.tasks}


def _engines(scenario: Scenario, store: SimStore) -> list[WorkerSpec]:
    config, world = scenario.config, scenario.world
    specs = []
    for name, pool in config.pools.items():
        hardware = pool.hardware or name
        settings = {
            "hardware": world.hardware_class(hardware, f"pools.{name}"),
            "model": world.model_profile(),
            "tasks": world.tasks,
            "seed": config.seed,
            "store": store,
            "inject": pool.inject,
            "measure": bool(config.automatic_tasks()),
            **dict(world.engine),
        }
        specs += [
            WorkerSpec(
                f"engine/{name}/{index}",
                Role.ENGINE,
                name,
                "rollart.sim.engine:SimEngine",
                settings,
                hardware,
                needs=needs_of(name) if world.nodes else NOTHING,
            )
            for index in range(pool.range.max)
        ]
    return specs


def _environments(scenario: Scenario) -> list[WorkerSpec]:
    config = scenario.config
    specs = []
    for task, settings in config.tasks.items():
        first = 0
        while first < settings.environments:
            slots = min(settings.environments_per_worker, settings.environments - first)
            specs.append(
                WorkerSpec(
                    f"environment/{task}/{first // settings.environments_per_worker}",
                    Role.ENVIRONMENT,
                    ENVIRONMENTS,
                    "rollart.sim.environment:SimEnvironments",
                    {"task": task, "profile": scenario.world.tasks[task], "slots": slots, "seed": config.seed},
                )
            )
            first += slots
    return specs


def _rewards(scenario: Scenario) -> list[WorkerSpec]:
    settings = {"tasks": scenario.world.tasks, "seed": scenario.config.seed, **dict(scenario.world.reward)}
    return [
        WorkerSpec(f"reward/{index}", Role.REWARD, REWARD, "rollart.sim.reward:SimReward", settings)
        for index in range(scenario.config.reward_workers)
    ]


def _trainer(scenario: Scenario, store: SimStore, checkpoints: SimCheckpoints) -> WorkerSpec:
    world = scenario.world
    settings = {
        "hardware": world.hardware_class(world.trainer.hardware, "sim.trainer.hardware"),
        "model": world.model_profile(),
        "ranks": world.trainer.ranks,
        "epochs": scenario.config.algorithm.epochs,
        "push_gb_s": world.trainer.push_gb_s,
        "store": store,
        "checkpoints": checkpoints,
    }
    pool = scenario.config.trainer.pool
    needs = needs_of(pool) if world.nodes and pool else NOTHING
    return WorkerSpec("trainer/0", Role.TRAINER, TRAINER, "rollart.sim.trainer:SimTrainer", settings, needs=needs)
