"""The scenarios that come with rollart: each loads, and those of the paper do what they are there to show."""

import functools

import pytest

from rollart.bench.control import CountingSink, scaled
from rollart.config.modes import Mode
from rollart.observe.audit import audit
from rollart.observe.journal import digest
from rollart.observe.report import Report, make_report
from rollart.sim.run import Simulated, simulate
from rollart.sim.scenario import load_scenario, scenario_names

# An eighth of the paper's cluster and batch: groups of one member keep the shares of the five tasks.
SMALL_PAPER = (
    "steps=3",
    "batch.trajectories=64",
    "batch.group_size=1",
    "tasks.swe.environments=20",
    "tasks.webshop.environments=13",
    "tasks.frozenlake.environments=13",
    "tasks.math.environments=13",
    "tasks.game.environments=12",
    "pools.H800.engines=2",
    "pools.H20.engines=1",
    "sim.trainer.ranks=4",
)


@functools.cache
def small_paper(mode: Mode) -> tuple[Simulated, Report]:
    done = simulate(load_scenario("paper", [*SMALL_PAPER, f"mode={mode.value}"]))
    return done, make_report(done.events)


def test_there_are_the_scenarios_that_the_documentation_names() -> None:
    assert {"laptop", "paper", "huge"} <= set(scenario_names())


@pytest.mark.parametrize("name", scenario_names())
def test_loads_and_says_what_it_is(name: str) -> None:
    scenario = load_scenario(name)
    assert scenario.config.name == name
    assert scenario.world.description


def test_the_paper_has_the_papers_numbers() -> None:
    scenario = load_scenario("paper")
    config, world = scenario.config, scenario.world
    assert (config.batch.trajectories, config.batch.group_size, config.alpha) == (512, 8, 1)
    assert sorted(config.groups_per_batch().values()) == [12, 13, 13, 13, 13]
    assert {name: pool.engines * world.engine.ranks for name, pool in config.pools.items()} == {"H800": 64, "H20": 32}
    assert (world.trainer.hardware, world.trainer.ranks) == ("H800", 32)
    assert {task.max_context for task in config.tasks.values()} == {32_768}
    assert {name for name, task in config.tasks.items() if task.hardware == "H20"} == {"math", "game"}


def test_huge_runs_ten_thousand_trajectories_at_once() -> None:
    scenario = load_scenario("huge")
    config, world = scenario.config, scenario.world
    assert sum(task.environments for task in config.tasks.values()) == config.batch.trajectories == 10_240
    gpus = sum(pool.engines for pool in config.pools.values()) * world.engine.ranks + world.trainer.ranks
    assert 3_000 <= gpus <= 3_200


@pytest.mark.parametrize("mode", Mode)
def test_the_paper_runs_in_every_mode_and_nothing_is_lost(mode: Mode) -> None:
    done, report = small_paper(mode)
    assert done.error is None
    assert audit(done.events) == []
    assert report.open_trajectories == 0
    assert report.steps == 3
    assert not report.redistributed


def test_the_modes_come_in_the_papers_order() -> None:
    steps_s = [small_paper(mode)[1].step_s for mode in Mode]
    assert steps_s == sorted(steps_s, reverse=True)


def test_only_rollart_keeps_tasks_on_their_hardware() -> None:
    for mode in Mode:
        at_home = [turns.get("H20", 0) for task, turns in small_paper(mode)[1].placements.items() if task == "swe"]
        assert (at_home == [0]) == (mode is Mode.ROLLART)


def test_a_sink_of_ones_own_gets_the_whole_journal() -> None:
    sink = CountingSink()
    scenario = scaled(32)
    assert simulate(scenario, sink).events == []
    kept = simulate(scenario).events
    assert sink.events == len(kept)
    assert digest(kept) == digest(simulate(scenario).events)


# Half of the paper's batch, on half of its ablation's engines: 8 H800 and 3 H20 cost 103, 9 H800 103, 26 H20 104.
HALF = (
    "steps=4",
    "batch.trajectories=256",
    "batch.group_size=4",
    "tasks.swe.environments=78",
    "tasks.webshop.environments=52",
    "tasks.frozenlake.environments=52",
    "tasks.math.environments=52",
    "tasks.game.environments=48",
    "pools.H800.engines=8",
    "pools.H20.engines=3",
    "sim.trainer.ranks=16",
)
AUTO = tuple(f"tasks.{task}.hardware=auto" for task in ("swe", "webshop", "frozenlake", "math", "game"))
ON_H800 = ("pools.H800.engines=9", "pools.H20.engines=0", "tasks.math.hardware=H800", "tasks.game.hardware=H800")
ON_H20 = (
    "pools.H800.engines=0",
    "pools.H20.engines=26",
    *(f"tasks.{task}.hardware=H20" for task in ("swe", "webshop", "frozenlake")),
)


def half(*assignments: str) -> Report:
    done = simulate(load_scenario("paper", [*HALF, *assignments]))
    assert done.error is None
    assert audit(done.events) == []
    return make_report(done.events)


def test_classes_found_by_measurement_are_as_good_as_the_papers() -> None:
    """`rollart bench affinity --sim` shows the same at the paper's size."""
    found = half(*AUTO)
    assert found.trajectories_per_s >= 0.97 * half().trajectories_per_s
    assert found.trajectories_per_s > half(*ON_H800).trajectories_per_s
    assert found.trajectories_per_s > half(*ON_H20).trajectories_per_s
    for task in ("swe", "webshop", "frozenlake"):
        assert "prefill, which costs" in found.affinity[task]
    assert found.moves <= 1
