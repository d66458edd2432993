"""Verdict on the world of one seed."""

from collections import Counter
from typing import NamedTuple

from rollart.config.modes import Mode
from rollart.sim.crashes import run_world
from rollart.sim.fuzz import make_world

MIN_STEPS, MIN_TRAJECTORIES = 3, 50
"""Minimum size of a world that counts as a test."""


class Verdict(NamedTuple):
    """Result of one seed, small enough to send between processes."""

    seed: int
    mode: str
    violations: list[str]
    rule: int
    injected: Counter[int]
    steps: int
    trajectories: int
    digest: str


def check_seed(seed: int, mode: Mode | None = None) -> Verdict:
    """Run the world of a seed. A world too small to prove anything is a violation too."""
    world = make_world(seed, mode)
    done = run_world(world)
    violations = [str(violation) for violation in done.violations]
    if done.steps < MIN_STEPS or done.trajectories < MIN_TRAJECTORIES:
        violations.append(f"the world is too small: {done.steps} steps, {done.trajectories} trajectories")
    rule = done.violations[0].rule if done.violations else 0
    return Verdict(
        seed, world.tables["mode"], violations, rule, done.injected, done.steps, done.trajectories, done.digest
    )
