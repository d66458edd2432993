"""Make a failing world smaller for as long as it still breaks the same rule: what is left is what matters."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

from rollart.sim.fuzz import World

Fails = Callable[[World], bool]


def shrink(world: World, fails: Fails, attempts: int = 400) -> World:
    """The smallest world found within so many attempts. `fails` says whether a world still breaks the rule."""
    smaller = True
    while smaller and attempts > 0:
        smaller = False
        for candidate in _smaller(world):
            attempts -= 1
            if fails(candidate):
                world, smaller = candidate, True
                break
            if attempts <= 0:
                break
    return world


def _smaller(world: World) -> Iterator[World]:
    """Worlds with one thing less, the big things first."""
    if world.link is not None:
        yield world._replace(link=None)
    for index in range(len(world.controller_dies_at_s)):
        deaths = world.controller_dies_at_s
        yield world._replace(controller_dies_at_s=deaths[:index] + deaths[index + 1 :])
    for index in range(len(world.faults)):
        yield world._replace(faults=world.faults[:index] + world.faults[index + 1 :])
    for change in _simpler_tables(world.tables):
        tables = copy.deepcopy(world.tables)
        change(tables)
        if tables != world.tables:
            yield world._replace(tables=tables)


def _simpler_tables(tables: dict[str, Any]) -> Iterator[Callable[[dict[str, Any]], None]]:
    if len(tables["tasks"]) > 1:
        for task in tables["tasks"]:
            yield lambda t, task=task: _without_task(t, task)  # type: ignore[misc]
    for key, value in (("eval_every", 0), ("rolling_update", False), ("reward_workers", 1), ("alpha", 0)):
        yield lambda t, key=key, value=value: t.update({key: value})  # type: ignore[misc]
    yield lambda t: t.update(algorithm={})
    for key in ("extra_groups", "extra_members"):
        yield lambda t, key=key: t["batch"].update({key: 0})  # type: ignore[misc]
    if tables["steps"] > 1:
        yield lambda t: t.update(steps=t["steps"] - 1)
    for pool in tables["pools"]:
        yield lambda t, pool=pool: t["pools"][pool].update(engines=1)  # type: ignore[misc]
    for task in tables["tasks"]:
        yield lambda t, task=task: t["tasks"][task].update(share=1)  # type: ignore[misc]
        yield lambda t, task=task: t["sim"]["tasks"][task].update(reset_failure=0.0, step_failure=0.0)  # type: ignore[misc]
    shares = sum(task["share"] for task in tables["tasks"].values())
    yield lambda t: t["batch"].update(trajectories=shares * t["batch"]["group_size"])


def _without_task(tables: dict[str, Any], task: str) -> None:
    del tables["tasks"][task], tables["sim"]["tasks"][task]
    shares = sum(other["share"] for other in tables["tasks"].values())
    tables["batch"]["trajectories"] = shares * tables["batch"]["group_size"]
