"""Shrink a failing world as long as it still breaks the same rule, to keep only what matters.

Only possible worlds are tried: the config must accept them, and they must keep what the fuzzer promises of every world
(`fuzz.one_task_is_patient`). Otherwise a smaller world may break the rule for a reason of its own.
"""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from rollart.config.tasks import ANY
from rollart.sim.faults import Fault
from rollart.sim.fuzz import PATIENT_S, Drain, World, one_task_is_patient
from rollart.sim.scenario import parse_scenario
from rollart.types.errors import ConfigError

Fails = Callable[[World], bool]
Change = Callable[[World], World]
Tables = dict[str, Any]
Edit = Callable[[Tables], None]


def shrink(world: World, fails: Fails, attempts: int = 400) -> World:
    """The smallest world found by running `fails` on at most `attempts` others.

    Passes over all changes until one changes nothing. A change that helps is kept and the pass goes on, so that a world
    with many superfluous things takes about one attempt for each.
    """
    while True:
        before = world
        for change in list(_changes(world)):
            candidate = change(world)
            if candidate == world or not _possible(candidate):
                continue
            if attempts <= 0:
                return world
            attempts -= 1
            if fails(candidate):
                world = candidate
        if world == before:
            return world


def _possible(world: World) -> bool:
    try:
        parse_scenario(world.tables)
    except ConfigError:
        return False
    return one_task_is_patient(world.tables)


def _changes(world: World) -> Iterator[Change]:
    """Changes that leave one thing out, the big things first."""
    yield lambda world: world._replace(link=None)
    yield from (partial(_without_drain, drain) for drain in world.drains)
    yield from (partial(_without_death, death) for death in world.controller_dies_at_s)
    yield from (partial(_without_fault, fault) for fault in world.faults)
    yield from (partial(_edited, edit) for edit in _edits(world.tables))


def _without_death(at_s: float, world: World) -> World:
    return world._replace(controller_dies_at_s=tuple(other for other in world.controller_dies_at_s if other != at_s))


def _without_drain(drain: Drain, world: World) -> World:
    return world._replace(drains=tuple(other for other in world.drains if other is not drain))


def _without_fault(fault: Fault, world: World) -> World:
    return world._replace(faults=tuple(other for other in world.faults if other is not fault))


def _edited(edit: Edit, world: World) -> World:
    tables = copy.deepcopy(world.tables)
    edit(tables)
    return world._replace(tables=tables)


def _edits(tables: Tables) -> Iterator[Edit]:
    yield from (partial(_remove_task, task) for task in tables["tasks"])
    for key, value in (("eval_every", 0), ("rolling_update", False), ("reward_workers", 1), ("alpha", 0)):
        yield partial(dict.update, **{key: value})
    yield partial(dict.update, algorithm={})
    yield lambda tables: tables["batch"].update(extra_groups=0)
    yield lambda tables: tables["batch"].update(extra_members=0, max_extra_members=None)
    yield lambda tables: tables["batch"].update(min_group_size=None)
    yield from (partial(_at_most_steps, steps) for steps in range(1, tables["steps"]))
    yield from (partial(_one_engine, pool) for pool in tables["pools"])
    yield from (partial(_steady, pool) for pool in tables["pools"])
    yield from (partial(_without_node, node) for node in tables["sim"].get("nodes", ()))
    yield _fit_batch
    for task in tables["tasks"]:
        yield from (partial(_edit_task, edit, task) for edit in _TASK_EDITS)


def _at_most_steps(steps: int, tables: Tables) -> None:
    tables["steps"] = min(tables["steps"], steps)


def _one_engine(pool: str, tables: Tables) -> None:
    tables["pools"][pool]["engines"] = 1


def _without_node(node: dict[str, Any], tables: Tables) -> None:
    """Without a node that does not stay. The others keep their room for what must run."""
    nodes = tables["sim"].get("nodes", [])
    tables["sim"]["nodes"] = [other for other in nodes if other != node or "until_s" not in node]


def _steady(pool: str, tables: Tables) -> None:
    """The pool keeps its speed."""
    tables["pools"][pool].pop("inject", None)


def _remove_task(task: str, tables: Tables) -> None:
    if len(tables["tasks"]) > 1:
        del tables["tasks"][task], tables["sim"]["tasks"][task]
        _fit_batch(tables)


def _edit_task(edit: Callable[[Tables, str], None], task: str, tables: Tables) -> None:
    if task in tables["tasks"]:
        edit(tables, task)


def _share_of_one(tables: Tables, task: str) -> None:
    tables["tasks"][task]["share"] = 1
    _fit_batch(tables)


def _fit_batch(tables: Tables) -> None:
    """The smallest batch that the shares divide into whole groups."""
    shares = sum(task["share"] for task in tables["tasks"].values())
    tables["batch"]["trajectories"] = shares * tables["batch"]["group_size"]


def _no_failures(tables: Tables, task: str) -> None:
    tables["sim"]["tasks"][task].update(reset_failure=0.0, step_failure=0.0)


def _usual_bounds(tables: Tables, task: str) -> None:
    for key in ("alpha", "stale_retries", "late_alpha"):
        tables["tasks"][task].pop(key, None)


def _anywhere(tables: Tables, task: str) -> None:
    tables["tasks"][task]["hardware"] = ANY


def _patient(tables: Tables, task: str) -> None:
    tables["tasks"][task]["share_deadline_s"] = PATIENT_S


def _constant_workload(tables: Tables, task: str) -> None:
    """Replace every distribution of a length or latency by its median."""
    workload = tables["sim"]["tasks"][task]
    for name, drawn in workload.items():
        if isinstance(drawn, dict):
            workload[name] = drawn["median"] if "median" in drawn else (drawn["low"] + drawn["high"]) / 2


def _plain_reward(tables: Tables, task: str) -> None:
    tables["tasks"][task].pop("rewards", None)
    for key in ("group_rewards", "part_rewards"):
        tables["sim"]["tasks"][task].pop(key, None)


_TASK_EDITS = (_plain_reward, _share_of_one, _no_failures, _usual_bounds, _anywhere, _patient, _constant_workload)
